"""The formats of numbers that models are kept and computed in, and the ways to train in them: the one table of both.

It has no torch: `slipstream.model.torch_dtype` makes a dtype of a format's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.errors import SlipstreamError

PrecisionName = Literal["float32", "bf16", "bf16-weights", "fp16"]
BasePrecision = Literal["full", "nf4"]


@dataclass(frozen=True)
class NumberFormat:
    """A format of floating-point numbers, with the bytes of a parameter that is trained in it by AdamW.

    Args:
        name: in torch, in a cluster's `device.flops` and in a profile.
        weight_bytes: of a weight, and of an element of activations.
        gradient_bytes: of a gradient, as training adds it up; more than of a weight where that is too narrow for sums.
        optimizer_bytes: of two moments, and of a master weight beside a narrow one.
        code: its name in a safetensors file.
        aliases: torch's other names of it.
    """

    name: str
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    code: str
    aliases: tuple[str, ...] = ()

    @property
    def is_narrow(self) -> bool:
        """Whether sums of such numbers are kept in a wider format."""
        return self.weight_bytes < self.gradient_bytes


FLOAT64 = NumberFormat("float64", 8, 8, 16, "F64", ("double",))
FLOAT32 = NumberFormat("float32", 4, 4, 8, "F32", ("float",))
BFLOAT16 = NumberFormat("bfloat16", 2, 4, 12, "BF16")
FLOAT16 = NumberFormat("float16", 2, 4, 12, "F16", ("half",))
FORMATS = {each.name: each for each in (FLOAT64, FLOAT32, BFLOAT16, FLOAT16)}
"""The formats in which models are trained and planned."""

# 64 weights share a scale in 8 bits, of which 256 share one in float32.
NF4 = NumberFormat("nf4", 1 / 2 + (1 + 4 / 256) / 64, gradient_bytes=0, optimizer_bytes=0, code="U8")
"""The format of frozen weights below an adapter: none is trained in it, and products are computed in another."""


def find_format(name: str) -> NumberFormat:
    """Returns the format by its name, or another one of torch's.

    Raises:
        SlipstreamError: models aren't trained in it.
    """
    found = next((each for each in FORMATS.values() if name in (each.name, *each.aliases)), None)
    if found is None:
        raise SlipstreamError(
            f"models can't be trained in dtype={name!r}, nor planned: choose float32, bfloat16 or float16."
        )
    return found


@dataclass(frozen=True)
class TrainingPrecision:
    """A value of `training.precision`.

    Args:
        name: the value.
        weights: the format of the parameters.
        computed: that of matrix products; under autocast where it isn't the weights'.
        measured: the name under which layers are measured for a plan.
        master: the format of copies that the optimizer updates. None: the weights themselves.
        scales_loss: whether small gradients would vanish without a factor of the loss.
        aliases: what others call it, in lower case, and bits as a number.
    """

    name: PrecisionName
    weights: NumberFormat
    computed: NumberFormat
    measured: str
    master: NumberFormat | None = None
    scales_loss: bool = False
    aliases: tuple[str | int, ...] = ()

    @property
    def autocasts(self) -> bool:
        """Whether products are computed in another format than that of the weights."""
        return self.computed is not self.weights


AUTOCAST = "bf16"
"""The dtype of a profile whose weights are float32, computed under bfloat16 autocast."""

PRECISIONS: dict[str, TrainingPrecision] = {
    each.name: each
    for each in (
        TrainingPrecision("float32", FLOAT32, FLOAT32, FLOAT32.name, aliases=("fp32", "32", 32)),
        TrainingPrecision("bf16", FLOAT32, BFLOAT16, AUTOCAST, aliases=("bfloat16", "mixed", 16)),
        TrainingPrecision("bf16-weights", BFLOAT16, BFLOAT16, BFLOAT16.name, master=FLOAT32),
        TrainingPrecision("fp16", FLOAT32, FLOAT16, FLOAT32.name, scales_loss=True, aliases=("float16", "half")),
    )
}
"""The values of `training.precision`."""


def weight_format(dtype: str) -> NumberFormat:
    """Returns the format of weights that are trained, or measured, in this dtype; it is another one under autocast.

    Raises:
        SlipstreamError: models aren't trained in it.
    """
    return PRECISIONS[AUTOCAST].weights if dtype == AUTOCAST else find_format(dtype)


def precision_of(dtype: str) -> PrecisionName | None:
    """Returns the `training.precision` whose products are of this dtype, and whose weights are too where there is one;
    None where there is none."""
    alike = [each for each in PRECISIONS.values() if each.computed.name == dtype]
    return min(alike, key=lambda each: each.autocasts).name if alike else None
