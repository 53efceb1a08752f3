"""What PyTorch's allocator holds of a GPU beside what tensors need, and what to type where that is much."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from slipstream.units import bytes_text, times_text

# torch 2.11 to 2.13 read the first that is set. The newer name, PYTORCH_ALLOC_CONF, is read where the older isn't.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_MUCH = 0.2  # of what tensors need, held besides
_LITTLE = 2**30  # bytes; less isn't worth a word, whatever share it is
_ADVICE_OF_TORCH = " If reserved but unallocated"  # which doesn't look whether its advice was followed


@dataclass(frozen=True)
class GpuMemory:
    """What the allocator of a process's GPU has counted: bytes, and how often something has happened."""

    allocated: int  # in tensors, at most
    reserved: int  # taken from the driver, at most
    between: int  # free now, in segments that tensors hold another part of
    retries: int  # all unused segments were given back to the driver, as no free block was large enough
    failures: int  # errors for lack of memory

    @classmethod
    def now(cls) -> GpuMemory | None:
        """Returns what was counted on the current GPU; None where this process has no tensors on one."""
        found = torch.cuda.memory_stats()
        if not found.get("allocated_bytes.all.peak"):
            return None
        return cls(
            allocated=found["allocated_bytes.all.peak"],
            reserved=found["reserved_bytes.all.peak"],
            between=found["inactive_split_bytes.all.current"],
            retries=found["num_alloc_retries"],
            failures=found["num_ooms"],
        )

    @property
    def is_fragmented(self) -> bool:
        """Whether much more is reserved than tensors have needed at the same time."""
        return self.reserved - self.allocated > max(_MUCH * self.allocated, _LITTLE)

    def describe(self) -> str:
        """Returns what was held at most."""
        return (
            f"tensors held {bytes_text(self.allocated)} of the GPU at most, and PyTorch's allocator had reserved "
            f"{bytes_text(self.reserved)}"
        )


def allocator_setting(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the variable that PyTorch's allocator reads and its value, as it is typed; "" where none is set."""
    name = next((name for name in _VARIABLES if name in environment), None)
    return "" if name is None else f"{name}={environment[name]}"


def expands_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether segments may grow."""
    return _EXPANDABLE.lower() in allocator_setting(environment).replace(" ", "").lower()


def fragmentation_advice(environment: Mapping[str, str] = os.environ) -> str:
    """Returns what to type against gaps between tensors; what is set already stays."""
    if expands_segments(environment):
        return f"{_EXPANDABLE} is set already, which keeps gaps small: only needing less memory helps further"
    name, _, value = allocator_setting(environment).partition("=")
    others = [each for each in value.split(",") if each and "expandable_segments" not in each]
    setting = f"{name or _VARIABLES[0]}={','.join([*others, _EXPANDABLE])}"
    return f"put {setting} before the command: then tensors of any size can use gaps between others"


@contextmanager
def shortage_explained() -> Iterator[None]:
    """Adds to an error for lack of a GPU's memory what the allocator held, and what to type."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).partition("\n")[0].partition(_ADVICE_OF_TORCH)[0].rstrip(". ")
        if (held := GpuMemory.now()) is not None:
            gaps = f"; {bytes_text(held.between)} lay free between tensors"
            again = f", and it had given back all that was unused {times_text(held.retries)}" if held.retries else ""
            first += f". In this process {held.describe()}{again}{gaps}. Against gaps, {fragmentation_advice()}"
        error.args = (first,)
        raise
