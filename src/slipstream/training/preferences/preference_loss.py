"""The loss of pairs of answers, and the rewards that it compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slipstream.pipeline import Pipeline
from slipstream.pipeline.pipeline_options import SequenceLoss
from slipstream.training.config import PreferenceSection


def preference_loss(section: PreferenceSection) -> SequenceLoss:
    """Returns the loss of a chosen and a rejected answer, whose `sequence_values` are their log-probabilities by the
    reference."""
    smoothing = section.label_smoothing

    def dpo(log_probabilities: Tensor, reference: Tensor) -> Tensor:
        chosen, rejected = _rewards(log_probabilities, reference, section)
        margins = chosen - rejected
        return -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)

    return SequenceLoss(dpo, group_size=2)


def reward_sums(
    pipe: Pipeline, reference: Tensor, section: PreferenceSection, counts: Sequence[bool] | None = None
) -> Tensor:
    """Returns what `sums_of_pairs` does, of the last step or evaluation and all replicas. Collective.

    `reference` has the log-probabilities of this replica's answers, in the order of its batch; `counts` says of each of
    its pairs whether it counts, by default all.
    """
    sums = sums_of_pairs(pipe.sequence_log_probabilities(), reference.to(pipe.device), section, counts)
    return pipe.axes["dp"].sum(sums)


def sums_of_pairs(
    log_probabilities: Tensor, reference: Tensor, section: PreferenceSection, counts: Sequence[bool] | None = None
) -> Tensor:
    """Returns sums over pairs, (5,) float64: 1, the rewards of the chosen and of the rejected answers, whether the
    chosen one's is larger, and the loss."""
    chosen, rejected = _rewards(log_probabilities, reference, section)
    losses = preference_loss(section).function(log_probabilities, reference)
    columns = torch.stack([torch.ones_like(chosen), chosen, rejected, (chosen > rejected).double(), losses])
    kept = slice(None) if counts is None else torch.tensor(counts, device=columns.device)
    return columns[:, kept].sum(1)


def mean_rewards(sums: Tensor) -> dict[str, float]:
    """Returns what the metrics say of rewards, means over pairs, from `reward_sums` of one batch or several."""
    count, chosen, rejected, num_right, _ = sums.tolist()
    return {
        "chosen": chosen / count,
        "rejected": rejected / count,
        "margin": (chosen - rejected) / count,
        "accuracy": num_right / count,
    }


def describe_rewards(rewards: Mapping[str, float]) -> str:
    """Returns in words of how many pairs the chosen answer's reward is the larger one, and by how much it is."""
    return f"accuracy {rewards['accuracy']:.0%}  margin {rewards['margin']:.3f}"


def _rewards(log_probabilities: Tensor, reference: Tensor, section: PreferenceSection) -> tuple[Tensor, Tensor]:
    """Returns the rewards of the chosen and of the rejected answers, (pairs,) each."""
    chosen, rejected = (section.beta * (log_probabilities - reference)).view(-1, 2).unbind(1)
    return chosen, rejected
