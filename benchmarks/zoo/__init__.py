"""Every causal language model of transformers, tiny: sliced over two ranks and compared with the unsplit model."""
