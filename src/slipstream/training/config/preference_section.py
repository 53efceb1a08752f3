"""The section of a configuration that trains on preferences: pairs of answers, of which one is preferred."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from slipstream.options import Record
from slipstream.training.config.data_section import DataSection, SourceSection
from slipstream.training.config.sections import PipelineSection

_OF_OTHER_ROWS = ("form", "loss", "text_column", "messages_column", "suffixes")


class PreferenceSection(Record):
    """Training on pairs of a chosen and a rejected answer, by direct preference optimization (DPO)."""

    loss: Literal["dpo"] = "dpo"
    """dpo: the logistic loss of the difference between both answers' rewards (Rafailov et al. 2023, equation 7). A
    reward is beta times the log of how much more probable an answer has become than before the training."""
    beta: PositiveFloat = 0.1
    """What rewards are multiplied by: the larger, the closer the model stays to what it was."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """How probable it is that a pair is the wrong way round (conservative DPO, Mitchell 2023)."""


def check_preference(data: DataSection, pipeline: PipelineSection) -> None:
    """Raises ValueError for settings that don't go with pairs of answers."""
    for number, source in enumerate(data.all_sources):
        _check_source(source, "data" if data.sources is None else f"data.sources[{number}]")
    refused = {
        "data.packing=fixed": (data.packing == "fixed", "each answer is a sequence of its own length"),
        "data.streaming=true": (data.streaming, "what the model finds of all pairs is computed before the first step"),
        "pipeline.vocabulary=spread": (pipeline.vocabulary == "spread", "its loss needs all logits in one place"),
        "pipeline.router_loss=per_layer": (
            pipeline.router_loss != "none",
            "a router's share of a loss of pairs isn't defined",
        ),
    }
    for setting, (is_given, why) in refused.items():
        if is_given:
            raise ValueError(f"{setting} with preference: {why}; leave it out")


def _check_source(source: SourceSection, name: str) -> None:
    if not source.has_rows:
        raise ValueError(f"preference needs pairs; give {name}.dataset, a .jsonl or .parquet file or a name on the hub")
    if str(source.dataset).endswith(".txt"):
        raise ValueError(f"{name}.dataset={source.dataset} has lines and no pairs; give a .jsonl or .parquet file")
    for setting in _OF_OTHER_ROWS:
        value = getattr(source, setting)
        if value != SourceSection.model_fields[setting].default:
            raise ValueError(
                f"{name}.{setting}={value} with preference, whose rows have the columns prompt, chosen and rejected, "
                "and whose answers count; leave it out"
            )
