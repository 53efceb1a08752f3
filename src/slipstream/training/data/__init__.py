"""From text to batches: corpora, tokenizers and packing."""

from slipstream.training.data.batch_size import BatchSize, Sequences, spread_batches
from slipstream.training.data.corpus import read_documents
from slipstream.training.data.packing import PackedSequences, TokenBatch, TokenisedText, unigram_entropy
from slipstream.training.data.tokenizer import load_tokenizer, tokenise, train_tokenizer
from slipstream.training.data.whole_documents import WholeDocuments


def sequences_of(text: TokenisedText, packing: str, seq_len: int, seed: int | None) -> Sequences:
    """Returns the sequences of a text, by `data.packing`: of one length, or as long as its documents."""
    return PackedSequences(text, seq_len, seed) if packing == "fixed" else WholeDocuments(text, seq_len, seed)
