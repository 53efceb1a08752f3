"""A Trainer of transformers that trains a Pipeline: same arguments, callbacks and logs. Needs accelerate."""

from slipstream.transformers_trainer.slipstream_trainer import SlipstreamTrainer
