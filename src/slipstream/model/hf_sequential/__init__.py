"""Turns Hugging Face models other than causal LMs into an `nn.Sequential`."""
