"""Checks a whole run, and prepares its text, before a rank starts or a byte is written."""

from slipstream.train.preflight.all_checks import preflight
from slipstream.train.preflight.lone_rank_facts import lone_rank_facts
from slipstream.train.preflight.memory_check import less_memory, memory_account, simulated_ratio
from slipstream.train.preflight.possible_meshes import first_mesh, possible_meshes
from slipstream.train.preflight.text_preparation import check_turns
