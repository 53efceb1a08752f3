"""Keeps the weights of frozen linear layers in 4 bits, as QLoRA does (Dettmers et al. 2023, arXiv:2305.14314)."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from slipstream.autograd_calls import with_backward
from slipstream.errors import SlipstreamError
from slipstream.number_format import NF4, BasePrecision

# It warns on CPUs where a package for faster inference isn't installed, which training doesn't use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
_BLOCK, _SCALES = 64, 256  # weights per scale, and scales per scale of scales
_KIND = NF4.name
"""How the weights beneath an adapter are kept: as wide as the model computes, or in 4 bits."""


class QuantisedLinear(nn.Linear):
    """y = x W^T + b, whose W, (out, in), is frozen and in 4 bits: normal floats in blocks of 64 weights, whose scales
    are in 8 bits (double quantisation). That is 0.516 bytes for a weight.

    Both directions multiply with W in the dtype of their input, which is made anew each time. In a state dict W is as
    wide as it was.
    """

    weight: nn.Parameter  # packed, (ceil(out in / 2), 1) uint8
    scales: Tensor  # scales of blocks, in 8 bits
    scale_of_scales: Tensor
    scale_code: Tensor  # the 256 values of an 8-bit scale, of unit size
    offset: Tensor  # mean of all scales

    def __init__(self, linear: nn.Linear) -> None:
        """Quantises the weight of `linear`, which may be on the meta device, and takes its bias over."""
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._wide = linear.weight.dtype
        weight = linear.weight.detach()
        packed, *scales = _empty(weight) if weight.is_meta else _quantised(weight)
        self.weight = nn.Parameter(packed, requires_grad=False)
        for name, tensor in zip(("scales", "scale_of_scales", "scale_code", "offset"), scales, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.train(linear.training)

    @property
    def num_weights(self) -> int:
        """The number of weights, packed or not."""
        return self.in_features * self.out_features

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns W, (out, in)."""
        operations = torch.ops.bitsandbytes
        scales = operations.dequantize_blockwise.default(
            self.scales, self.scale_of_scales, self.scale_code, _SCALES, torch.float32
        )
        narrow = dtype if dtype.itemsize <= 4 else torch.float32
        shape = (self.out_features, self.in_features)
        weight: Tensor = operations.dequantize_4bit.default(
            self.weight, scales + self.offset, _BLOCK, _KIND, shape, narrow
        )
        return weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., out) of x (..., in)."""
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        # Neither x nor the wide W is kept for the backward.
        (y,) = with_backward(
            lambda x: (functional.linear(x, self.dequantised(x.dtype)),),
            lambda gradient: (gradient @ self.dequantised(gradient.dtype),),
            x,
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # in host memory, as the weights of a rank may be more than its device has room for
        destination[f"{prefix}weight"] = self.dequantised(self._wide).cpu()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()


def _quantised(weight: Tensor) -> tuple[Tensor, ...]:
    """Returns a weight's 4 bits, packed, and the tensors of their scales."""
    from bitsandbytes.functional import quantize_4bit

    narrow = weight if weight.dtype.itemsize <= 4 else weight.to(torch.float32)
    packed, state = quantize_4bit(narrow, blocksize=_BLOCK, compress_statistics=True, quant_type=_KIND)
    return packed, state.absmax, state.state2.absmax, state.state2.code, state.offset


def _empty(weight: Tensor) -> tuple[Tensor, ...]:
    """Returns the same of a weight on the meta device, not by bitsandbytes, which would keep a table from there."""
    import bitsandbytes  # noqa: F401 - it registers the operations that make the weight wide

    blocks = math.ceil(weight.numel() / _BLOCK)
    bits = [(math.ceil(weight.numel() / 2), 1), (blocks,)]
    wide = [(math.ceil(blocks / _SCALES),), (256,), ()]
    return (
        *(weight.new_empty(size, dtype=torch.uint8) for size in bits),
        *(weight.new_empty(size, dtype=torch.float32) for size in wide),
    )


def check_base_precision(base_precision: BasePrecision, lora: Any) -> None:
    """Raises SlipstreamError for an unknown precision, and where all weights would be trained in 4 bits."""
    if base_precision not in (allowed := get_args(BasePrecision)):
        raise SlipstreamError(f"lora_base_precision={base_precision!r}: give {' or '.join(map(repr, allowed))}.")
    if lora is None and base_precision != "full":
        raise SlipstreamError(
            f"lora_base_precision={base_precision!r} without lora: weights in 4 bits can't be trained. Give "
            "lora=peft.LoraConfig(...), which is trained beside them, or leave lora_base_precision out."
        )


def check_quantisable(whole: PreTrainedModel, lora: Any, setting: str = "lora.base_precision") -> None:
    """Raises SlipstreamError where bitsandbytes isn't installed, and where an adapter, PEFT's `lora`, can't be trained
    beside the weights in 4 bits of `whole`, which may be on the meta device: none of them can be kept so, a copy of one
    is trained, or the adapter needs them wide."""
    if find_spec("bitsandbytes") is None:
        raise SlipstreamError(f"{setting}={_KIND} needs bitsandbytes, an extra: pip install 'slipstream[qlora]'")
    if getattr(lora, "use_dora", False):
        raise SlipstreamError(
            f"{setting}={_KIND} with use_dora=True, which needs the norms of wide weights. Leave one of the two out."
        )
    names = quantised_names(whole)
    if not names:
        raise SlipstreamError(
            f"{setting}={_KIND}: {type(whole).__name__} has no nn.Linear besides its head, whose weights could be kept "
            "in 4 bits. Leave it out."
        )
    copied = tuple(lora.modules_to_save or ())
    if copied and (both := [name for name in names if name.endswith(copied)]):
        raise SlipstreamError(
            f"{setting}={_KIND} with modules_to_save={[*copied]}: {both[0]} is kept in 4 bits, of which no copy can be "
            "trained. It can have an adapter; leave it out of modules_to_save."
        )


def quantised_names(whole: nn.Module) -> list[str]:
    """Returns the names of the linear layers that are kept in 4 bits: all but the head, as transformers has it."""
    head = whole.get_output_embeddings() if isinstance(whole, PreTrainedModel) else None
    return [name for name, module in whole.named_modules() if type(module) is nn.Linear and module is not head]


def quantise(model: nn.Module, names: Collection[str]) -> None:
    """Keeps the weights of these linear layers, as far as they are there, in 4 bits, one after the other: also of those
    that PEFT has wrapped, which `names` have as the model without an adapter has them."""
    for name, module in [*model.named_modules()]:
        if name.removesuffix(".base_layer") in names and type(module) is nn.Linear:
            model.set_submodule(name, QuantisedLinear(module))


@torch.no_grad()
def round_to_4_bits(model: PreTrainedModel) -> None:
    """Gives the linear layers of a whole model the weights that 4 bits stand for, in the dtype that they have."""
    for name in quantised_names(model):
        linear: Any = model.get_submodule(name)
        linear.weight.copy_(QuantisedLinear(linear).dequantised(linear.weight.dtype))
