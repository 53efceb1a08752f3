"""A Trainer of transformers that trains a Pipeline: same arguments, callbacks and logs. Needs accelerate."""

from importlib.util import find_spec

if find_spec("accelerate") is None:
    raise ImportError("a Trainer needs accelerate, which isn't installed: pip install 'slipstream[trainer]'")

from slipstream.extras.hf_trainer.trainer import SlipstreamTrainer
