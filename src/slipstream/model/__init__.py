"""A model and its stages: Hugging Face causal LMs split over ranks and sliced over tokens, their code untouched."""

from __future__ import annotations

from slipstream.model.anatomy import Anatomy, LayerPart, find_anatomy
from slipstream.model.fused import check_compiler, fuse
from slipstream.model.halves import find_halves
from slipstream.model.layer_range import (
    ALLOWED_COUNTS,
    Edge,
    Half,
    HalfLayer,
    LayerRange,
    Owned,
    are_allowed,
)
from slipstream.model.limits import check_length, check_token_ids
from slipstream.model.loading import (
    config_from_settings,
    load_config,
    model_to_time,
    pretrained_model,
    random_model,
    skeleton,
)
from slipstream.model.self_check import TOLERANCE, check_sliceable
from slipstream.model.split import half_of, share
from slipstream.model.stage import Stage, TiedWeight, uses_randomness
from slipstream.model.storages import SavedStorages, model_storages, storage_bytes, storage_id, storage_ids
from slipstream.model.tensor_spec import Tensors, TensorSpec, apart

__all__ = [
    "ALLOWED_COUNTS",
    "TOLERANCE",
    "Anatomy",
    "Edge",
    "Half",
    "HalfLayer",
    "LayerPart",
    "LayerRange",
    "Owned",
    "SavedStorages",
    "Stage",
    "TensorSpec",
    "Tensors",
    "TiedWeight",
    "apart",
    "are_allowed",
    "check_compiler",
    "check_length",
    "check_sliceable",
    "check_token_ids",
    "config_from_settings",
    "find_anatomy",
    "find_halves",
    "fuse",
    "half_of",
    "load_config",
    "model_storages",
    "model_to_time",
    "pretrained_model",
    "random_model",
    "share",
    "skeleton",
    "storage_bytes",
    "storage_id",
    "storage_ids",
    "uses_randomness",
]
