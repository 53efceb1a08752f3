"""Messages between ranks: their format, their transport, and skip connections."""

from slipstream.comm.message import HEADER_BYTES, Message, SkipSend, TransportError, message_bytes
from slipstream.comm.side_channels import SkipMessages, VocabularyMessages, skip_channels, vocabulary_channels
from slipstream.comm.staged_transport import StagedTransport, connect_transport
from slipstream.comm.transport import (
    DistributedTransport,
    FakeTransport,
    LocalTransport,
    ScatterGather,
    Transport,
    part_size,
)
