"""From text to batches: corpora, tokenizers and packing."""
