"""Where keys and values lie where `memory.context` is "auto": on the device where they fit it, else on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.units import bytes_text


class ContextPlace(NamedTuple):
    """The place of keys and values, decided once for all ranks.

    Args:
        name: "device" or "host".
        reason: why it is there.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"keys and values are on the {self.name}, as memory.context=auto: {self.reason}"


UNCOUNTABLE = SlipstreamError, ValueError, NotImplementedError
"""What counting a model, or evaluating a plan, may raise."""


def context_place(held: Callable[[], float], room: float, host_refusal: str) -> ContextPlace:
    """Returns where keys and values lie.

    Args:
        held: returns the bytes that the fullest rank would hold with keys and values on its device, by the account of
            plans.
        room: bytes that it may hold.
        host_refusal: why they can't be on the host; "" where they can.

    Raises:
        SlipstreamError: where they don't fit the device and can't be on the host, or what ranks hold can't be counted.
    """
    try:
        most = held()
    except UNCOUNTABLE as error:
        if host_refusal:
            return ContextPlace("device", f"they can't be on the host, as {host_refusal}")
        raise SlipstreamError(
            f"memory.context=auto is decided by counted operations, which aren't known here: {error} Give "
            "memory.context=device, or host."
        ) from None
    would = f"the fullest rank would hold {bytes_text(most)} with them on its device, which has {bytes_text(room)}"
    if most <= room:
        return ContextPlace("device", would)
    if host_refusal:
        raise SlipstreamError(
            f"memory.context=auto: keys and values can't be on the host, as {host_refusal}, and {would}. Give "
            "memory.context=device and shorter sequences, or memory.recompute=stage, which holds less."
        )
    return ContextPlace("host", would)
