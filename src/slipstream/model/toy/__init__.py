"""Builds and runs architectures at toy size, in which what a model does shows in a second."""
