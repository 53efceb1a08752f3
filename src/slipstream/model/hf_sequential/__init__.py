"""Hugging Face models other than causal LMs as a sequence of layers."""
