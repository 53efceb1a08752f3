"""Runs a schedule against costs instead of tensors: start and end times, and memory."""
