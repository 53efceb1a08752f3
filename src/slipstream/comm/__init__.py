"""Messages between ranks: their format, and their transport."""

from slipstream.comm.message import HEADER_BYTES, Message, TransportError, message_bytes
from slipstream.comm.staged_transport import StagedTransport, connect_transport
from slipstream.comm.transport import (
    DistributedTransport,
    FakeTransport,
    LocalTransport,
    ScatterGather,
    Transport,
)
