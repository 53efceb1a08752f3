"""Turns a model into pipeline stages: Hugging Face causal LMs and `nn.Sequential`s, their own code unchanged."""

from slipstream.model.adapted_modules import (
    AdaptedName,
    adapter_dropouts,
    dora_layers,
    features_of,
    inner_modules,
    is_wrapper,
    own_module,
    parse_name,
)
from slipstream.model.adapter_files import check_saved_weights, read_adapter_config, saves_ends
from slipstream.model.adapters import Adapter, adapter_of, check_method, check_parallel
from slipstream.model.added_adapter import adapted_model, add_adapter, find_targets, quiet_peft
from slipstream.model.anatomy import (
    LayerPart,
    ModelAnatomy,
    anatomy_of_size,
    check_runs_every_layer,
    dropout_rates,
    expert_modules,
    find_anatomy,
    switch_off_dropout,
    uses_randomness,
)
from slipstream.model.autograd_memory import (
    RecomputePolicy,
    SavedTensors,
    SliceReplay,
    activations_on_host,
    recompute_advice,
    recompute_in_backward,
    take_differing_layers,
    without_saved_tensors_hooks,
)
from slipstream.model.causal_lm_stage import CausalLMStage, add_embedding_noise
from slipstream.model.compiled_region import watched_kernels
from slipstream.model.config import (
    MANY_TOKENS,
    check_counted_positions,
    check_is_causal_lm,
    check_length,
    check_router_loss,
    check_unquantised,
    config_from_settings,
    load_config,
    longest_sequence,
    trust_remote_code,
    with_settings,
)
from slipstream.model.cross_entropies import IGNORED, causal_cross_entropy, cross_entropy, token_cross_entropy
from slipstream.model.cutting import Placeholder, keep_half, keep_layers, parts_of, units_of
from slipstream.model.fusion import check_compiler, fuse_kernels
from slipstream.model.layer_halves import find_halves, halves_or_none, why_layers_stay_whole
from slipstream.model.layer_range import (
    HalfLayer,
    LayerHalf,
    LayerRange,
    ModelEnd,
    StagePart,
)
from slipstream.model.loading import (
    NewTokens,
    check_saved_model,
    meta_model,
    model_for_timing,
    pretrained_model,
    random_model,
    set_vocab_size,
    whole_pretrained_model,
)
from slipstream.model.module_copies import copy_modules, copy_with_shared_weights, separate_modules
from slipstream.model.operation_counter import OperationCounter, weight_multiplications
from slipstream.model.own_code import HOOKS, references
from slipstream.model.pipeline_stage import PipelineStage, in_evaluation
from slipstream.model.quantised import (
    QuantisedLinear,
    check_base_precision,
    check_quantisable,
    quantise,
    quantised_names,
    round_to_4_bits,
)
from slipstream.model.reached_tensors import NamedWeights, TakenStorages, graph_leaves, held_weights
from slipstream.model.self_check import (
    TOLERANCE,
    LabelLoss,
    SelfCheck,
    TokenCuts,
    TrialResult,
    check_carried_state,
    check_causal,
    check_packed,
    check_sliceable,
    check_trainable,
    find_label_loss,
    longest_packed_sequence,
    result_by_kind,
    try_changes,
    try_dispatched,
)
from slipstream.model.tensors import (
    NARROW,
    SavedStorages,
    Tensors,
    TensorSpec,
    copied_from_messages,
    has_parameters,
    model_storages,
    storage_bytes,
    storage_id,
    storage_ids,
    tied_names,
    torch_dtype,
    written_tensors,
)
from slipstream.model.tiled_head import HeadTiles, check_tiled_head
from slipstream.model.toy import (
    full_precision,
    perturb_parameters,
    quiet_transformers,
    reference_model,
    toy_config,
    toy_failure,
    toy_model,
    toy_tokens,
)
from slipstream.model.trained_weights import ALL_WEIGHTS, TrainedWeights, find_frozen, freeze, trained_text
from slipstream.model.user_changes import HOOK_NAMES, Change, GivenModel, compare_with_config, find_changes
from slipstream.model.vocabulary import (
    HeadNames,
    HeadRows,
    RowSoftmax,
    SpreadHead,
    combine_softmax,
    find_spreadable_head,
)
from slipstream.model.weight_gradients import (
    WeightGradient,
    add_weight_gradients_in_place,
    compiled_modules,
    defer_weight_gradients,
    factors_of,
    is_compiled,
    left_to_autograd,
)
from slipstream.model.weight_io import copy_beside, read_generation, state_misfits, write_generation, write_model
from slipstream.model.written_adapter import merged_state, merged_with_base, write_adapter
