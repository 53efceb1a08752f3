"""Adapters of PEFT: which can be trained exactly, how each rank gets its own, and the folders they are saved in."""

from slipstream.model.adapters.adapted_modules import is_wrapper, own_module
from slipstream.model.adapters.adapter_check import Adapter, adapter_of, check_method, check_parallel
from slipstream.model.adapters.adapter_loading import add_adapter, quiet_peft, targeted_modules
