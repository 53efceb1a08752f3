"""Messages between ranks: their format, their transport, and skip connections."""

from __future__ import annotations

from slipstream.pipeline.messages.message import HEADER_BYTES, Message, TransportError
from slipstream.pipeline.messages.scatter_gather import ScatterGather, part_size
from slipstream.pipeline.messages.skip_messages import SkipMessages, skip_channels
from slipstream.pipeline.messages.transport import (
    DistributedTransport,
    LocalTransport,
    Transport,
    connect,
)

__all__ = [
    "HEADER_BYTES",
    "DistributedTransport",
    "LocalTransport",
    "Message",
    "ScatterGather",
    "SkipMessages",
    "Transport",
    "TransportError",
    "connect",
    "part_size",
    "skip_channels",
]
