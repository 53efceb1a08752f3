"""Tells tensors whose elements are all finite from those that no training can go on from."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.checkpoint.verified_files import DamagedError


def is_finite(tensor: Tensor) -> bool:
    """Returns whether no element is infinite or not a number.

    A sum is finite only where all of its terms are, and it takes a fraction of the time of looking at each of them,
    which is left for the sums that have overflowed.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def find_non_finite(path: Path) -> str | None:
    """Returns the name of a tensor in a safetensors file that isn't finite, None where all are. Raises DamagedError
    where it is no such file."""
    try:
        with safe_open(path, framework="pt") as file:
            return next((name for name in file.keys() if not is_finite(file.get_tensor(name))), None)  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedError(f"{path.name} isn't a safetensors file: {error}") from None


def describe_non_finite(name: str) -> str:
    """Returns the part of a sentence that says a tensor isn't finite."""
    return f"{name} has elements that are infinite or not numbers"
