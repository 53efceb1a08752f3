"""The losses of training on preferences, which compare pairs of answers or rate each, and the rewards they imply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slipstream.model import IGNORED
from slipstream.pipeline import Pipeline, SequenceLoss
from slipstream.train.config import PreferenceSection
from slipstream.train.data import TokenBatch, TokenisedText
from slipstream.train.training_step import Evaluator


def preference_loss(section: PreferenceSection) -> SequenceLoss:
    """Returns the loss of a chosen and a rejected answer, whose `sequence_values` are their log-probabilities by the
    reference, or the values of `with_lengths`; or of rated answers, as `with_reference_point` has them."""

    def margins(log_probabilities: Tensor, values: Tensor) -> Tensor:
        chosen, rejected = _rewards(log_probabilities, values, section)
        return chosen - rejected - (section.gamma if section.loss == "simpo" else 0.0)

    def logistic(log_probabilities: Tensor, values: Tensor) -> Tensor:
        margin = margins(log_probabilities, values)
        smoothing = section.label_smoothing
        return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)

    def orpo(log_probabilities: Tensor, values: Tensor) -> Tensor:
        means = (log_probabilities[:, 1] / values[:, 1]).view(-1, 2)
        chosen, rejected = (means - _log_of_rest(means)).unbind(1)
        cross_entropy = -(log_probabilities.sum(1) / values.sum(1)).view(-1, 2)[:, 0]
        return cross_entropy - section.beta * logsigmoid(chosen - rejected)

    def kto(log_probabilities: Tensor, values: Tensor) -> Tensor:
        rewards = section.beta * (log_probabilities - values[:, 0])
        signs = values[:, 1]
        weights = signs.new_tensor([section.undesirable_weight, section.desirable_weight])[(signs > 0).long()]
        return weights * (1 - torch.sigmoid(signs * (rewards - section.beta * values[:, 2])))

    if section.is_rated:
        return SequenceLoss(kto)
    is_orpo = section.loss == "orpo"
    return SequenceLoss(orpo if is_orpo else logistic, group_size=2, prompts=is_orpo)


def _log_of_rest(logs: Tensor) -> Tensor:
    """Returns log(1 - exp(x)) of logs of probabilities, exact near 0 and far below it."""
    below = logs.clamp(max=-torch.finfo(logs.dtype).tiny)
    near = below > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(below)), torch.log1p(-torch.exp(torch.where(near, -1.0, below))))


def reward_sums(
    pipe: Pipeline, values: Tensor, section: PreferenceSection, counts: Sequence[bool] | None = None
) -> Tensor:
    """Returns the sums of `sums_of_pairs`, of the last step or evaluation and all replicas. Collective.

    `values` are the `sequence_values` of this replica's answers, in the order of its batch; `counts` says of each of
    its pairs whether it counts, by default all.
    """
    sums = sums_of_pairs(pipe.sequence_log_probabilities(), values.to(pipe.device), section, counts)
    return pipe.axes["dp"].sum(sums)


def sums_of_pairs(
    log_probabilities: Tensor, values: Tensor, section: PreferenceSection, counts: Sequence[bool] | None = None
) -> Tensor:
    """Returns sums over pairs, (7,) float64: 1, the rewards of the chosen and of the rejected answers, whether the
    chosen one's is larger, the loss, and the numbers of chosen and of rejected answers.

    Of rated answers the chosen ones are those that are wanted; right is a reward on its side of the reference point.
    """
    losses = preference_loss(section).function(log_probabilities, values)
    if section.is_rated:
        rewards = section.beta * (log_probabilities - values[:, 0])
        is_chosen = (values[:, 1] > 0).double()
        is_rejected = 1 - is_chosen
        is_right = values[:, 1] * (rewards - section.beta * values[:, 2]) > 0
        chosen = rewards * is_chosen
        rejected = rewards * is_rejected
    else:
        chosen, rejected = _rewards(log_probabilities, values, section)
        is_chosen = is_rejected = torch.ones_like(chosen)
        is_right = chosen > rejected
    parts = [torch.ones_like(losses), chosen, rejected, is_right.double(), losses, is_chosen, is_rejected]
    columns = torch.stack(parts)
    counted = slice(None) if counts is None else torch.tensor(counts, device=columns.device)
    return columns[:, counted].sum(1)


def mean_rewards(sums: Tensor) -> dict[str, float]:
    """Returns the rewards for the metrics, means over pairs, from `reward_sums` of one batch or several."""
    count, chosen, rejected, num_right, _, num_chosen, num_rejected = sums.tolist()
    chosen = chosen / max(num_chosen, 1)
    rejected = rejected / max(num_rejected, 1)
    return {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": num_right / count}


def describe_rewards(rewards: Mapping[str, float]) -> str:
    """Returns in words of how many pairs the chosen answer's reward is the larger one, and by how much it is."""
    return f"accuracy {rewards['accuracy']:.0%}  margin {rewards['margin']:.3f}"


def _rewards(log_probabilities: Tensor, values: Tensor, section: PreferenceSection) -> tuple[Tensor, Tensor]:
    """Returns the rewards of the chosen and of the rejected answers, (pairs,) each."""
    if section.loss == "dpo":
        logs = log_probabilities - values
    elif section.loss == "simpo":
        logs = log_probabilities / values
    else:
        logs = log_probabilities[:, 1] / values[:, 1]
    chosen, rejected = (section.beta * logs).view(-1, 2).unbind(1)
    return chosen, rejected


def with_lengths(text: TokenisedText, section: PreferenceSection) -> TokenisedText:
    """Returns a text of answers for a loss that needs no model before the training: of each answer how many targets it
    has, (D,), for orpo (D, 2) with those of the prompt first, which then count as well."""
    documents = [text.labels_of(index) for index in range(text.num_documents)]
    # Number of targets before the first that counts.
    firsts = [int(np.argmax(labels[1:] != IGNORED)) for labels in documents]
    answers = [int((labels[1:] != IGNORED).sum()) for labels in documents]
    if section.loss == "simpo":
        return replace(text, values=np.array(answers, dtype=np.float64))
    values = np.array([firsts, answers], dtype=np.float64).T.reshape(-1, 2)
    return replace(text, values=values, prompts_count=True)


def with_reference_point(evaluator: Evaluator, batch: TokenBatch, counts: Sequence[bool] | None = None) -> TokenBatch:
    """Returns the rated answers of a batch, which has each followed by its prompt with another answer, and with them
    the reference point: how much more probable these have become on average, over all replicas, and at least 0.

    It runs these forward, by the model as it is now; `counts` says which of them count. Collective.
    """
    pipe = evaluator.pipe
    values = batch.sequence_values
    assert values is not None
    tokens = [*batch.input_ids]
    labels = [*batch.labels]
    others = TokenBatch(tokens[1::2], labels[1::2], None, torch.zeros(len(tokens) // 2, 3, dtype=torch.float64))
    evaluator.loss(others)
    ratios = pipe.sequence_log_probabilities().cpu() - values[1::2, 0]
    mask = torch.ones(len(ratios), dtype=torch.bool) if counts is None else torch.tensor(counts)
    total, count = pipe.axes["dp"].sum(torch.stack([ratios[mask].sum(), mask.sum().double()]).to(pipe.device)).tolist()
    point = torch.full((len(ratios), 1), max(0.0, total / max(count, 1)), dtype=torch.float64)
    return TokenBatch(tokens[::2], labels[::2], None, torch.cat([values[::2], point], dim=1))
