"""Which settings go by the best validation, and what they need."""

from __future__ import annotations

from slipstream.training.config.data_section import DataSection
from slipstream.training.config.sections import CheckpointSection, TrainingSection


def check_validations(training: TrainingSection, checkpoint: CheckpointSection, data: DataSection) -> None:
    """Raises ValueError for settings that go by the best validation where there are none, or it isn't kept."""
    by_validation = {
        "checkpoint.keep_best=true": checkpoint.keep_best,
        f"training.patience={training.patience}": training.patience is not None,
    }
    for setting in filter(by_validation.get, by_validation):
        if not training.eval_every:
            raise ValueError(f"{setting} goes by validations; give --training.eval_every=100, or leave it out")
        if data.validation is None and not data.validation_fraction:
            raise ValueError(
                f"{setting} goes by validations, and data.validation_fraction=0 holds no text out; give a larger "
                "share, such as --data.validation_fraction=0.05, or name a text in data.validation"
            )
    if training.export == "best" and not checkpoint.keep_best:
        raise ValueError("training.export=best exports the checkpoint that checkpoint.keep_best=true keeps; give that")
