"""Samples of any form: texts, conversations, prompts with completions, and tokens with labels."""

from slipstream.training.data.samples.chat_template import ChatTemplate, find_turn_problems
from slipstream.training.data.samples.example_text import show_example
from slipstream.training.data.samples.mixed_streams import MixedStreams
from slipstream.training.data.samples.open_source import OpenSource
from slipstream.training.data.samples.streamed_sequences import StreamedSequences
from slipstream.training.data.samples.tokenised_samples import SampleReader, tokenise_samples
from slipstream.training.data.samples.training_data import load_sequences, stream_sequences
