"""A model at toy size and its unsliced reference, for the self-checks."""
