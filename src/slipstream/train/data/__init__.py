"""From text and conversations to batches: sources, tokenizers and packing."""

from collections.abc import Sequence

from slipstream.train.data.packing import (
    MixedSequences,
    PackedSamples,
    PackedSequences,
    PreferencePairs,
    WholeDocuments,
)
from slipstream.train.data.sequences import BatchSize, HeldOutBatches, TokenBatch, TrainingSequences
from slipstream.train.data.sources import Documents, read_documents, read_rows, row_files
from slipstream.train.data.tokenised_text import (
    DocumentWriter,
    TokenisedText,
    has_tokenizer,
    is_of_tokenizer,
    load_texts,
    load_tokenizer,
    prompt_beginning_twice,
    save_texts,
    tokenise,
    train_tokenizer,
    unigram_entropy,
)


def sequences_of(
    texts: Sequence[TokenisedText],
    packing: str,
    seq_len: int,
    seed: int | None,
    weights: Sequence[float] | None = None,
    pads: bool = False,
) -> TrainingSequences:
    """Returns the sequences of the sources' texts, by `data.packing`: of one length, or as long as their documents.

    `pads` makes a sequence of the end of each text, too, which training leaves out where it is shorter.
    """
    parts = [_sequences_of_one(text, packing, seq_len, seed, pads) for text in texts]
    return parts[0] if len(parts) == 1 else MixedSequences(parts, seed, weights)


def _sequences_of_one(
    text: TokenisedText, packing: str, seq_len: int, seed: int | None, pads: bool
) -> TrainingSequences:
    if text.group_size > 1:
        return PreferencePairs(text, seq_len, seed)
    if packing == "none":
        return WholeDocuments(text, seq_len, seed)
    return PackedSequences(text, seq_len, seed, pads) if text.labels is None else PackedSamples(text, seq_len, seed)
