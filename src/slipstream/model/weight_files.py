"""The weights of a model's folder by the headers of its safetensors files, compared with its configuration."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from slipstream.errors import SlipstreamError
from slipstream.model.toy import quiet_transformers


def check_weight_files(folder: Path, config: PretrainedConfig, kind: Any) -> str:
    """Checks by their headers, in milliseconds, that a folder's files have the weights of `kind`, a class of
    transformers, as `config` makes it. Returns a warning about the weights that it hasn't; "" where there are none.

    Raises:
        SlipstreamError: where a file is missing or damaged, or a weight is missing or has another shape.
    """
    state = _read_headers(folder, config)
    try:
        with quiet_transformers():  # transformers' own renaming and joining of weights, on tensors without memory
            _, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=dict(state),
                device_map="meta",
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    # Weights that can't be joined raise this.
    except RuntimeError as error:
        raise SlipstreamError(
            f"the weights in {folder} aren't those of its config.json: {_odd_shape(state) or error}. {_REMEDY}"
        ) from error
    check_loaded(str(folder), config, report)
    if not (unread := sorted(report["unexpected_keys"])):
        return ""
    return (
        f"{folder} has {len(unread)} weights that a {config.model_type!r} of its config.json hasn't, first "
        f"{unread[0]!r}: they are neither read nor trained"
    )


_REMEDY = "Take config.json and weights from the same model"


def check_loaded(path: str, config: PretrainedConfig, report: Mapping[str, Collection[Any]]) -> None:
    """Raises SlipstreamError where transformers' report on loading has weights that are missing or of another shape."""
    if other := sorted(report["mismatched_keys"]):
        name, saved, expected = other[0]
        more = f", and so are {len(other) - 1} more" if len(other) > 1 else ""
        raise SlipstreamError(
            f"the weights in {path} aren't those of its config.json: {name} is {[*saved]}, and by config.json "
            f"{[*expected]}{more}. {_REMEDY}"
        )
    if absent := sorted(report["missing_keys"]):
        raise SlipstreamError(
            f"the checkpoint {path!r} lacks {len(absent)} weights of {config.model_type!r}, first {absent[0]!r}. "
            "Expected a complete causal LM; a base model without its head can't be trained."
        )


def _read_headers(folder: Path, config: PretrainedConfig) -> dict[str, Tensor]:
    """Returns the tensors of a folder's safetensors files, without memory."""
    state = {}
    for file in _weight_files(folder, config):
        try:
            with safe_open(file, framework="pt") as opened:  # compares the header's sizes with the file's
                for name in opened.keys():  # noqa: SIM118
                    state[name] = torch.empty(opened.get_slice(name).get_shape(), device="meta")
        except (SafetensorError, OSError) as error:
            raise SlipstreamError(f"{file} is corrupt or truncated ({error}); copy or download it again") from error
    return state


def _weight_files(folder: Path, config: PretrainedConfig) -> list[Path]:
    """Returns the files that transformers reads of a folder.

    Raises SlipstreamError where there are none, or one of those that the index names isn't there.
    """
    single = folder / (getattr(config, "transformers_weights", None) or SAFE_WEIGHTS_NAME)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if single.exists() and single.suffix == ".safetensors":
        return [single]
    if not index.exists():
        others = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))[:3])
        raise SlipstreamError(
            f"the weights of {folder} can't be read: it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}"
            f"{f', only {others}' if others else ''}. Save the model by save_pretrained"
        )
    try:
        names = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        files = [folder / name for name in names]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SlipstreamError(f"{index} can't be read ({error}); copy or download it again") from error
    if absent := [file.name for file in files if not file.exists()]:
        raise SlipstreamError(
            f"{folder} lacks {len(absent)} of the {len(files)} files of its weights, first {absent[0]}; copy or "
            "download them"
        )
    return files


def _odd_shape(state: Mapping[str, Tensor]) -> str:
    """Returns which tensor has another shape than most of those whose names differ from its own in numbers alone; ""
    where there is none."""
    shapes: dict[str, Counter[torch.Size]] = {}
    for name, tensor in state.items():
        shapes.setdefault(re.sub(r"\d+", "*", name), Counter())[tensor.shape] += 1
    for name, tensor in state.items():
        alike = shapes[re.sub(r"\d+", "*", name)]
        usual, _ = alike.most_common(1)[0]
        if alike[tensor.shape] == 1 and tensor.shape != usual:
            return f"{name} is {[*tensor.shape]}, and others of its kind {[*usual]}"
    return ""
