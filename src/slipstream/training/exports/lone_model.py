"""A model in one process, which finds how probable documents are, long ones in token slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.model import IGNORED
from slipstream.options import Runtime
from slipstream.pipeline import Pipeline
from slipstream.pipeline.batch import slice_lengths
from slipstream.planner.steps import StepPlan
from slipstream.schedule import gpipe
from slipstream.training.config import Config, precision_named
from slipstream.training.data.tokenised_text import Array
from slipstream.training.training_step import autocast

Document = tuple[Array, Array]  # tokens and labels, of which the first is never predicted


class LoneModel:
    """The model in a folder, or of a name on the hub."""

    def __init__(self, model: str, longest: int, slice_len: int, config: Config | None) -> None:
        """`longest` is the most tokens of a document, of which `slice_len` are computed at a time. With `config` it
        computes in the precision of that training, else in that of the model.

        Raises SlipstreamError where the model can't be loaded, or can't be cut into slices exactly.
        """
        self._config, self._slice_len = config, slice_len
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        given: dict[str, Any] = {} if config is None else {"precision": precision_named(config.training.precision)}
        self._pipe = Pipeline.from_pretrained(
            model, slices=1, device=self._device.type, runtime=Runtime(self_check=longest > slice_len), **given
        )

    def log_probability(self, documents: Sequence[Document]) -> float:
        """Returns the log-probability of all labels that count, of documents that don't see each other."""
        number = sum(int((labels[1:] != IGNORED).sum()) for _, labels in documents)
        if number == 0:
            return 0.0
        tokens, labels = ([torch.from_numpy(each) for each in column] for column in zip(*documents, strict=True))
        slices = slice_lengths(-(-sum(map(len, tokens)) // self._slice_len), sum(map(len, tokens)))
        plan = StepPlan((tuple(range(len(tokens))),), (tuple(slices),), gpipe(1, 1, len(slices)))
        if self._config is None:
            return -number * float(self._pipe.evaluate(tokens, labels, plan=plan))
        with autocast(self._config, self._device):
            return -number * float(self._pipe.evaluate(tokens, labels, plan=plan))
