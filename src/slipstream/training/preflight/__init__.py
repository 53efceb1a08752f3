"""Checks a whole run, and prepares its text, before a rank starts or a byte is written."""

from slipstream.training.preflight.all_checks import preflight
from slipstream.training.preflight.memory_account import memory_account
from slipstream.training.preflight.memory_check import less_memory
from slipstream.training.preflight.model_checks import load_model_config
from slipstream.training.preflight.text_preparation import check_turns
