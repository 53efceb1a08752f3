"""The kinds of models a Pipeline trains: causal LMs and sequences of layers."""
