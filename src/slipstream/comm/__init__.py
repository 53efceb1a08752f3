"""Messages between ranks: their format, their transport, and skip connections."""

from slipstream.comm.message import HEADER_BYTES, Message, TransportError, message_bytes
from slipstream.comm.skip_messages import SkipMessages, skip_channels
from slipstream.comm.staged_transport import StagedTransport, connect_transport
from slipstream.comm.transport import (
    DistributedTransport,
    FakeTransport,
    LocalTransport,
    ScatterGather,
    Transport,
)
