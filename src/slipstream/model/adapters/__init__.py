"""What of a model is trained: what is not frozen, or an adapter of PEFT, of which each rank gets its own part."""

from slipstream.model.adapters.adapted_modules import (
    AdaptedName,
    adapter_dropouts,
    dora_layers,
    features_of,
    inner_modules,
    is_wrapper,
    own_module,
    parse_name,
)
from slipstream.model.adapters.adapter_check import Adapter, adapter_of, check_method, check_parallel
from slipstream.model.adapters.adapter_loading import adapted_model, add_adapter, find_targets, quiet_peft
from slipstream.model.adapters.frozen_parameters import find_frozen, freeze, trained_text
from slipstream.model.adapters.saved_adapter import check_saved_weights, load_saved_weights, read_adapter_config
from slipstream.model.adapters.trained_weights import ALL_WEIGHTS, TrainedWeights
