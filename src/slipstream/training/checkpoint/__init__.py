"""Checkpoints: saved while training goes on, whole or not at all, and loaded by any mesh of ranks."""

from __future__ import annotations

from slipstream.training.checkpoint.checkpoints import Checkpoints
from slipstream.training.checkpoint.found import Found
from slipstream.training.checkpoint.piece import Piece
from slipstream.training.checkpoint.run_state import Progression, describe_model, pieces
from slipstream.training.checkpoint.storage import CheckpointReader

__all__ = [
    "CheckpointReader",
    "Checkpoints",
    "Found",
    "Piece",
    "Progression",
    "describe_model",
    "pieces",
]
