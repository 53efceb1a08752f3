"""From text to batches: corpora, tokenizers and packing."""

from slipstream.training.data.corpus import read_documents
from slipstream.training.data.packing import PackedSequences, TokenBatch, TokenisedText, unigram_entropy
from slipstream.training.data.tokenizer import load_tokenizer, tokenise, train_tokenizer
