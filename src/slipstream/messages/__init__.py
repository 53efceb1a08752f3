"""Messages between ranks: their format, their transport, and skip connections."""

from slipstream.messages.made_up_transport import MadeUpTransport
from slipstream.messages.message import HEADER_BYTES, Message, SkipSend, TransportError, message_bytes
from slipstream.messages.scatter_gather import ScatterGather, part_size
from slipstream.messages.skip_messages import SkipMessages, skip_channels
from slipstream.messages.staged_transport import StagedTransport, connect_transport
from slipstream.messages.transport import DistributedTransport, LocalTransport, Transport
from slipstream.messages.vocabulary_messages import VocabularyMessages, vocabulary_channels
