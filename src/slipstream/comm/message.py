"""The format of a message: tensors of any shapes and dtypes in one buffer, behind a header that describes them.

gloo silently accepts a shorter message into a larger buffer, so every message describes itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import RankFailedError
from slipstream.model import Tensors, TensorSpec, torch_dtype
from slipstream.number_format import FORMATS
from slipstream.schedule import Action, Op

# A header is a multiple of this many int64 words: op, stage, microbatch, slice and number of tensors; dtype, number of
# dimensions and shape of each tensor; padding.
_BLOCK = 16
HEADER_BYTES = 8 * _BLOCK  # bytes of the header of a message with one tensor
_ALIGNMENT = 16  # every tensor of a message starts at a multiple of these bytes
_DTYPES = (
    *map(torch_dtype, FORMATS),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
_OPS = tuple(Op)
_NEVER_COPIED = -1  # code in the op's place for a buffer that no message was copied to
_Came = tuple[Action, list[tuple[torch.Size, torch.dtype]]]

Message = Action  # the message's SEND, on both ends


class TransportError(RankFailedError):
    """Raised where another message came than expected, or none: names both."""


def header_bytes(specs: Sequence[TensorSpec]) -> int:
    words = 5 + sum(2 + len(spec.shape) for spec in specs)
    return 8 * _BLOCK * -(-words // _BLOCK)


def message_bytes(specs: Sequence[TensorSpec]) -> int:
    """Returns the bytes of the buffer, the header included."""
    return _places(specs)[-1].stop if specs else header_bytes(specs)


def pack(message: Message, tensors: Tensors, buffer: Tensor) -> None:
    """Writes the message into a buffer of `message_bytes` uint8."""
    write_header(message, tensors, buffer)
    write_tensors(tensors, buffer)


def write_header(message: Message, tensors: Tensors, buffer: Tensor) -> None:
    """Writes the message's description to the beginning of the buffer."""
    header = header_of(message, tensors)
    # A copy from pageable memory would wait for everything queued on the GPU.
    if buffer.is_cuda:
        header = header.pin_memory()
    buffer[: 8 * len(header)].view(torch.int64).copy_(header, non_blocking=True)


def call_off(buffer: Tensor) -> None:
    """Turns a buffer into a message that says that its tensors could not be read."""
    buffer[:8].view(torch.int64).fill_(_NEVER_COPIED)


def write_tensors(tensors: Tensors, buffer: Tensor) -> None:
    """Writes the tensors of a message to their places behind its header."""
    specs = [TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    for place, tensor in zip(unpack(specs, buffer), tensors, strict=True):
        place.copy_(tensor.detach())


def unpack(specs: Sequence[TensorSpec], buffer: Tensor) -> Tensors:
    """Returns the tensors of a message, as views of the buffer."""
    placed = zip(specs, _places(specs), strict=True)
    return tuple(buffer[place].view(spec.dtype).view(spec.shape) for spec, place in placed)


def _places(specs: Sequence[TensorSpec]) -> list[slice]:
    """Returns where the bytes of each tensor lie in a message's buffer."""
    places = []
    end = header_bytes(specs)
    for spec in specs:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + spec.num_bytes
        places.append(slice(begin, end))
    return places


def header_of(message: Message, tensors: Tensors) -> Tensor:
    words = [_OPS.index(message.op), message.stage, message.microbatch, message.slice, len(tensors)]
    for tensor in tensors:
        words += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(words + [0] * (-len(words) % _BLOCK), dtype=torch.int64)


def header_in(buffer: Tensor) -> Tensor:
    """Returns the header of a received message: as many words as it can have, whatever was expected."""
    return buffer[: buffer.numel() // 8 * 8].view(torch.int64)


def check_header(header: Tensor, message: Message, specs: Sequence[TensorSpec]) -> None:
    """Raises TransportError where another message came than `message` of `specs`."""
    words = header[: header_bytes(specs) // 8].tolist()
    if words[0] == _NEVER_COPIED:
        raise TransportError(f"{message} can't come: its tensors could not be copied. See that rank's own last lines.")
    sent = Action(message.op, message.stage, message.microbatch, message.slice)
    expected = (sent, [(spec.shape, spec.dtype) for spec in specs])
    if _read(words) != expected:
        came = _read(header.tolist())
        raise TransportError(
            f"expected {message} of {_described(expected)}, but {came[0]} of {_described(came)} came. Every "
            "rank must call step with inputs of the same shape, under the same autocast."
        )


def _read(words: list[int]) -> _Came:
    """Returns the message of a header; one of more tensors than there is room for is read as far as it goes."""
    op, stage, microbatch, index, num_tensors, *rest = words
    tensors: list[tuple[torch.Size, torch.dtype]] = []
    while rest and len(tensors) < num_tensors:
        dtype, num_dims, *rest = [*rest, 0]
        tensors.append((torch.Size(rest[:num_dims]), _DTYPES[dtype]))
        rest = rest[num_dims:]
    return Action(_OPS[op], stage, microbatch, index), tensors


def _described(came: _Came) -> str:
    return " and ".join(f"{tuple(shape)} {dtype}" for shape, dtype in came[1]) or "nothing"
