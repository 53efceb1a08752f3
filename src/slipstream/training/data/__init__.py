"""From text and conversations to batches: sources, tokenizers and packing."""

from collections.abc import Sequence

from slipstream.training.data.batch_size import BatchSize, spread_batches
from slipstream.training.data.corpus import Documents, read_documents
from slipstream.training.data.held_out import HeldOutBatches
from slipstream.training.data.mixed_sequences import MixedSequences
from slipstream.training.data.packed_samples import PackedSamples
from slipstream.training.data.packing import PackedSequences
from slipstream.training.data.preference_pairs import PreferencePairs
from slipstream.training.data.rows import open_rows, read_rows, row_files
from slipstream.training.data.sequences import TokenBatch, TrainingSequences
from slipstream.training.data.tokenised_text import (
    DocumentWriter,
    TokenisedText,
    load_texts,
    save_texts,
    unigram_entropy,
)
from slipstream.training.data.tokenizer import (
    has_tokenizer,
    is_of_tokenizer,
    load_tokenizer,
    tokenise,
    train_tokenizer,
)
from slipstream.training.data.whole_documents import WholeDocuments


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
