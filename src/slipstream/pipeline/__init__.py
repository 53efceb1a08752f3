"""Runs a schedule with real tensors: the public Pipeline and the parts it is built from."""

from slipstream.pipeline.pipeline import Pipeline
