"""The sequences that a run trains on, as its configuration says: of texts on the disk, or of a stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.launch import Progress
from slipstream.training.config import Config, SourceSection
from slipstream.training.data import TokenisedText, load_texts, load_tokenizer, sequences_of, tokenise
from slipstream.training.data.samples.chat_template import ChatTemplate
from slipstream.training.data.samples.forms import find_form, find_loss
from slipstream.training.data.samples.mixed_streams import MixedStreams
from slipstream.training.data.samples.row_stream import RowStream
from slipstream.training.data.samples.streamed_sequences import StreamedSequences
from slipstream.training.data.samples.tokenised_samples import SampleReader, read_samples
from slipstream.training.data.sequences import TrainingSequences


def load_sequences(config: Config, inputs: Path, say: Callable[[str], None]) -> TrainingSequences:
    """Returns the sequences of a run whose inputs are in this folder. `say` gets what is left out of a stream."""
    section, training = config.data, config.training
    if section.streaming:
        return stream_sequences(config, load_tokenizer(str(inputs), config.model.trust_remote_code), say)
    texts = load_texts(inputs, "train")
    return sequences_of(texts, section.packing, training.seq_len, training.seed, section.weights)


def stream_sequences(config: Config, tokenizer: Any, say: Callable[[str], None]) -> StreamedSequences | MixedStreams:
    """Opens the data sets as streams, and reads the first block of each.

    Raises:
        SlipstreamError: where one can't be read, or its columns fit no form.
    """
    streams = [_stream(config, source, tokenizer, say) for source in config.data.all_sources]
    weights = config.data.weights
    return streams[0] if weights is None else MixedStreams(streams, weights, config.training.seed)


def _stream(config: Config, source: SourceSection, tokenizer: Any, say: Callable[[str], None]) -> StreamedSequences:
    section, seq_len = config.data, config.training.seq_len
    stream = RowStream(source, section.shuffle_rows)
    form = find_form(source, stream.columns)
    loss = find_loss(source, form)
    template = ChatTemplate(tokenizer, section.chat_template) if form == "messages" or section.chat_template else None
    reader = SampleReader(source, form, loss, tokenizer, template)

    def make(name: str, rows: list[dict[str, Any]]) -> TokenisedText:
        if form != "text":
            text, report = read_samples(rows, reader, name, seq_len)
        else:
            texts = [row[source.text_column] for row in rows]
            kept = [each for each in texts if isinstance(each, str) and each.strip()]
            left_out = len(texts) - len(kept)
            report = f"left out {left_out:,} of {len(texts):,} documents without text" if left_out else ""
            text = tokenise(tokenizer, kept, Progress(None))
        if report:
            say(f"{name}: {report}")
        return text

    facts = {"form": form, "loss": loss, "shuffle_rows": section.shuffle_rows}
    return StreamedSequences(stream, make, facts, section.packing, seq_len, config.training.seed)
