"""The loss and the rewards of a model on held-out pairs of answers, in one process: those of a validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.training.config import Config, PreferenceSection
from slipstream.training.data import TokenisedText
from slipstream.training.data.tokenised_text import Array
from slipstream.training.exports.lone_model import LoneModel
from slipstream.training.preferences import kept_reference, mean_rewards, sums_of_pairs
from slipstream.training.run_folder import RunFolder


@dataclass(frozen=True)
class PairLoss:
    """What a model loses on pairs of answers.

    Attributes:
        loss: the mean over pairs.
        rewards: means over pairs, by their names in the metrics.
    """

    num_pairs: int
    loss: float
    rewards: dict[str, float]


def log_probabilities(model: LoneModel, text: TokenisedText, what: str, progress: Progress) -> Array:
    """Returns the log-probability of each answer, (D,) float64."""
    found: list[float] = []
    with progress.counting(what, total=text.num_documents) as show:
        for index in range(text.num_documents):
            tokens, labels = (each.astype(np.int64) for each in (text.document(index), text.labels_of(index)))
            found.append(model.log_probability([(tokens, labels)]))
            show(len(found))
    return np.array(found)


def compare_pairs(found: Sequence[Array], reference: Sequence[Array], section: PreferenceSection) -> PairLoss:
    """Returns the loss of all texts' pairs, of whose answers the log-probabilities are given."""
    sums = sums_of_pairs(_joined(found), _joined(reference), section)
    return PairLoss(int(sums[0]), float(sums[4] / sums[0]), mean_rewards(sums))


def _joined(arrays: Sequence[Array]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def find_reference(run: RunFolder | None, text: TokenisedText) -> Array | None:
    """Returns the log-probabilities of a text's answers that a run has kept of its beginning; None where it has not."""
    return None if run is None or not run.reference.is_file() else kept_reference(run.reference, text)


def name_reference(config: Config, run: RunFolder | None, given: str | None) -> str:
    """Returns the model that rewards are relative to: the one that is given, or that the run began with.

    Raises SlipstreamError where neither is known.
    """
    if given is not None:
        return given
    if run is None:
        raise SlipstreamError(
            "rewards are relative to the model before the training on preferences; name it with --reference=MODEL"
        )
    if not config.model.pretrained:
        raise SlipstreamError(
            "the run began with random weights, and hasn't kept how probable these answers were by them; name a model "
            "to compare with by --reference=MODEL, or leave FILE out to evaluate the answers that the run held out"
        )
    return str(config.model.path)
