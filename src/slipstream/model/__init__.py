"""Turns a model into pipeline stages: Hugging Face causal LMs and `nn.Sequential`s, their own code unchanged."""

from slipstream.model.anatomy import (
    LayerPart,
    ModelAnatomy,
    dropout_rates,
    find_anatomy,
    switch_off_dropout,
    uses_randomness,
)
from slipstream.model.attached_code import copy_with_shared_weights
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
)
from slipstream.model.cross_entropy import IGNORED, causal_cross_entropy, cross_entropy, token_cross_entropy
from slipstream.model.cutting import keep_half, keep_layers, parts_of, units_of
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
from slipstream.model.pipeline_stage import PipelineStage
from slipstream.model.self_check import (
    TOLERANCE,
    LabelLoss,
    SelfCheck,
    TokenCuts,
    check_carried_state,
    check_causal,
    check_packed,
    check_sliceable,
    check_trainable,
    find_label_loss,
    longest_packed_sequence,
)
from slipstream.model.tensors import (
    NARROW,
    SavedStorages,
    Tensors,
    TensorSpec,
    copied_from_messages,
    model_storages,
    storage_bytes,
    storage_id,
    storage_ids,
    tied_names,
    torch_dtype,
)
