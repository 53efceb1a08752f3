"""Identifies the hardware, software and model that a profile belongs to."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from slipstream.planner.costs import Hardware, ModelIdentity
from slipstream.version import __version__

# Settings of a configuration that say where it came from and how it is loaded
_ORIGIN = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
# Other settings that change no cost
_FREE = {"bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "return_dict", "use_cache"}


def identify_hardware(device: torch.device, num_processes: int = 1) -> Hardware:
    """Returns the present hardware, on which `num_processes` compute at the same time."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Hardware(name, _cpu(), os.cpu_count() or 1, torch.get_num_threads(), num_processes)


def identify_model(config: PretrainedConfig) -> ModelIdentity:
    """Returns the shapes and the hash of a transformers configuration, ignoring token ids and other names."""
    text = config.get_text_config()
    settings = {key: value for key, value in without_origin(config.to_dict()).items() if key not in _FREE}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    return ModelIdentity(
        config.model_type, text.num_hidden_layers, text.hidden_size, text.vocab_size, config_hash=digest[:16]
    )


def without_origin(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration's settings, without those that say where it came from and how it is loaded."""
    return {key: value for key, value in settings.items() if key not in _ORIGIN}


def versions() -> dict[str, str]:
    """Returns the versions of the software that computes."""
    found = {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
