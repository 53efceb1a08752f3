"""Messages between ranks: their format, their transport, and skip connections."""

from slipstream.pipeline.messages.message import HEADER_BYTES, Message, TransportError
from slipstream.pipeline.messages.scatter_gather import ScatterGather, part_size
from slipstream.pipeline.messages.skip_messages import SkipMessages, skip_channels
from slipstream.pipeline.messages.transport import DistributedTransport, LocalTransport, Transport
