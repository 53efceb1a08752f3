"""Training on preferences: pairs of answers, the loss that compares them, and the reference model's part."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from slipstream.checkpoint import describe_non_finite
from slipstream.errors import RankFailedError, SlipstreamError
from slipstream.foreign_text import parse_json
from slipstream.model import IGNORED
from slipstream.pipeline import Pipeline
from slipstream.pipeline.pipeline_options import SequenceLoss
from slipstream.train.config import Config, PreferenceSection
from slipstream.train.data import (
    BatchSize,
    HeldOutBatches,
    PreferencePairs,
    TokenBatch,
    TokenisedText,
    load_texts,
)
from slipstream.train.data.tokenised_text import Array
from slipstream.train.run_context import RunContext
from slipstream.train.run_state import describe_base, describe_text
from slipstream.train.training_step import Evaluator
from slipstream.units import plural


def preference_loss(section: PreferenceSection) -> SequenceLoss:
    """Returns the loss of a chosen and a rejected answer, whose `sequence_values` are their log-probabilities by the
    reference, or the values of `with_lengths`; or of rated answers, as `with_reference_point` has them."""

    def margins(log_probabilities: Tensor, values: Tensor) -> Tensor:
        chosen, rejected = _rewards(log_probabilities, values, section)
        return chosen - rejected - (section.gamma if section.loss == "simpo" else 0.0)

    def logistic(log_probabilities: Tensor, values: Tensor) -> Tensor:
        margin, smoothing = margins(log_probabilities, values), section.label_smoothing
        return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)

    def orpo(log_probabilities: Tensor, values: Tensor) -> Tensor:
        means = (log_probabilities[:, 1] / values[:, 1]).view(-1, 2)
        chosen, rejected = (means - _log_of_rest(means)).unbind(1)
        cross_entropy = -(log_probabilities.sum(1) / values.sum(1)).view(-1, 2)[:, 0]
        return cross_entropy - section.beta * logsigmoid(chosen - rejected)

    def kto(log_probabilities: Tensor, values: Tensor) -> Tensor:
        rewards, signs = section.beta * (log_probabilities - values[:, 0]), values[:, 1]
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
        rewards, is_chosen = section.beta * (log_probabilities - values[:, 0]), (values[:, 1] > 0).double()
        is_rejected, is_right = 1 - is_chosen, values[:, 1] * (rewards - section.beta * values[:, 2]) > 0
        chosen, rejected = rewards * is_chosen, rewards * is_rejected
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
    chosen, rejected = chosen / max(num_chosen, 1), rejected / max(num_rejected, 1)
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
    firsts = [int(np.argmax(labels[1:] != IGNORED)) for labels in documents]  # targets before the first that counts
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
    pipe, values = evaluator.pipe, batch.sequence_values
    assert values is not None
    tokens, labels = [*batch.input_ids], [*batch.labels]
    others = TokenBatch(tokens[1::2], labels[1::2], None, torch.zeros(len(tokens) // 2, 3, dtype=torch.float64))
    evaluator.loss(others)
    ratios = pipe.sequence_log_probabilities().cpu() - values[1::2, 0]
    mask = torch.ones(len(ratios), dtype=torch.bool) if counts is None else torch.tensor(counts)
    total, count = pipe.axes["dp"].sum(torch.stack([ratios[mask].sum(), mask.sum().double()]).to(pipe.device)).tolist()
    point = torch.full((len(ratios), 1), max(0.0, total / max(count, 1)), dtype=torch.float64)
    return TokenBatch(tokens[::2], labels[::2], None, torch.cat([values[::2], point], dim=1))


Texts = Mapping[str, Sequence[TokenisedText]]  # of each part, train and validation, that of every source


def load_with_reference(run: RunContext, pipe: Pipeline, resumes: bool) -> dict[str, list[Any]]:
    """Returns the texts of a run, `train` and `validation`, each document with a further argument of its loss: its
    log-probability by the reference, which is the model as the pipeline has it now, or its lengths. Collective.

    A run that resumes reads those of its beginning.

    Raises:
        SlipstreamError: on all ranks, where a run resumes and that isn't there, or is of other answers or weights.
        RankFailedError: on all ranks, where it can't be written.
    """
    config, folder, progress = run.config, run.folder, run.progress
    texts = {part: load_texts(folder.inputs, part) for part in ("train", "validation")}
    section = config.preference
    assert section is not None
    if not section.has_reference:
        return {part: [with_lengths(text, section) for text in part_texts] for part, part_texts in texts.items()}
    if resumes:
        check_reference(config, texts)
        return _with_values(texts, _read(folder.reference))
    named = {f"{part}-{index}": text for part, part_texts in texts.items() for index, text in enumerate(part_texts)}
    total, size = sum(text.num_documents // 2 for text in named.values()), BatchSize.of(config.training)
    with progress.counting("computing the reference", total) as show:
        computed = log_probabilities(Evaluator(pipe, config), named.values(), size, show, 3 if section.is_rated else 0)
    values = dict(zip(named, computed, strict=True))
    for text in computed:
        if not np.isfinite(text).all():
            pair = int(np.flatnonzero(~np.isfinite(text.reshape(-1, 2)).all(1))[0])
            weight = pipe.find_non_finite()
            why = "give another --training.precision" if weight is None else describe_non_finite(weight)
            raise SlipstreamError(
                f"before training, an answer of pair {pair + 1} has a log-probability that isn't finite: {why}"
            )
    _write(run, values, _describe(config, texts))
    what = "answer" if section.is_rated else "pair"
    progress.say(f"computed the reference of {plural(total, what)}, kept in {folder.reference}")
    return _with_values(texts, values)


def check_reference(config: Config, texts: Texts) -> None:
    """Raises SlipstreamError where the reference of a run that is to be resumed isn't in its folder, is damaged, or is
    of other answers or weights."""
    file = config.folder.reference
    again = "or train from the beginning in another folder"
    if not file.exists():
        raise SlipstreamError(
            f"there is no {file}, which says how probable each answer was before the training, and which the run can't "
            f"be resumed without; put it back, {again}"
        )
    try:
        with safe_open(file, framework="np") as opened:
            was = parse_json(opened.metadata()["slipstream"])
            _read(file)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise SlipstreamError(f"{file} is damaged ({error}); put a copy back, {again}") from error
    now = json.loads(json.dumps(_describe(config, texts)))
    what = {"base": "weights", "train": "answers", "validation": "held-out answers"}
    if different := [words for part, words in what.items() if was.get(part) != now[part]]:
        raise SlipstreamError(
            f"{file} is of other {' and '.join(different)} than the run has now; resume with the model and the data "
            f"that it began with, {again}"
        )


def kept_reference(file: Path | None, text: TokenisedText) -> Array | None:
    """Returns the values of these very answers in a run's file, (D,) float64; None where it has none."""
    if file is None or not file.is_file():
        return None
    with safe_open(file, framework="np") as opened:
        was = parse_json(opened.metadata()["slipstream"])
        for part in ("train", "validation"):
            if (this := describe_text(text)) in was[part]:
                return np.asarray(opened.get_tensor(f"{part}-{was[part].index(this)}"))
    return None


def _describe(config: Config, texts: Texts) -> dict[str, Any]:
    """Returns the facts that the reference depends on."""
    model, seed = config.model, config.training.seed
    base = describe_base(str(model.path)) if model.pretrained else {"seed": seed}
    return {"base": base, **{part: [describe_text(text) for text in part_texts] for part, part_texts in texts.items()}}


def log_probabilities(
    evaluator: Evaluator,
    texts: Iterable[TokenisedText],
    size: BatchSize,
    show: Callable[[float], None],
    num_values: int = 0,
) -> list[Array]:
    """Returns those of all documents of each text, (D,) float64, or (D, 2) with those of prompts apart.

    `show` gets the number of pairs that are done; the loss takes `num_values` of each document, 0 for a number. It's
    collective.
    """
    pipe, done, computed = evaluator.pipe, 0, list[Array]()
    replica = pipe.replica, pipe.num_replicas
    for text in texts:
        if not text.num_documents:
            computed.append(np.zeros(0))
            continue
        pairs = PreferencePairs(text, int(text.lengths.max()), seed=None)
        held_out, numbers, parts = HeldOutBatches(pairs, size), list[int](), list[Array]()
        for batch in held_out.chosen():  # the last one begins again with the first pairs
            mine = held_out.batch(batch, *replica)
            if mine.sequence_values is None:
                shape = (len(mine.input_ids), num_values) if num_values else (len(mine.input_ids),)
                mine = mine._replace(sequence_values=torch.zeros(shape, dtype=torch.float64))
            evaluator.loss(mine)
            numbers += pairs.share(*batch, *replica)
            found_here = pipe.sequence_log_probabilities().cpu().numpy()
            parts.append(found_here.reshape(-1, 2, *found_here.shape[1:]))
            show(min(done + sum(batch), done + pairs.num_sequences))
        values = np.full((pairs.num_sequences, *parts[0].shape[1:]), np.nan)
        for places, part_values in pipe.axes["dp"].gather((numbers, np.concatenate(parts))):
            values[np.asarray(places) % pairs.num_sequences] = part_values
        done += pairs.num_sequences
        computed.append(values.reshape(-1, *values.shape[2:]))
    return computed


def _with_values(texts: Texts, values: Mapping[str, Array]) -> dict[str, list[Any]]:
    return {
        part: [_with_reference(text, values[f"{part}-{index}"]) for index, text in enumerate(part_texts)]
        for part, part_texts in texts.items()
    }


def _with_reference(text: TokenisedText, reference: Array) -> TokenisedText:
    """Returns a text with its log-probabilities by the reference, of rated answers beside 1 or -1: wanted or not."""
    if text.ratings is None:
        return replace(text, values=reference)
    signs = np.repeat(np.where(text.ratings, 1.0, -1.0), 2)
    return replace(text, values=np.stack([reference, signs], axis=1))


def _read(file: Path) -> dict[str, Array]:
    with safe_open(file, framework="np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it isn't iterable


def _write(run: RunContext, values: dict[str, Array], facts: dict[str, Any]) -> None:
    """Writes the file on the first rank, whole or not at all. Collective."""
    problem, folder = None, run.folder
    if run.world.rank == 0:
        try:
            folder.listed.add(folder.reference)
            with folder.replaced(folder.reference) as part:
                save_file(values, part, metadata={"slipstream": json.dumps(facts)})
        except (OSError, SafetensorError) as error:
            problem = str(error)
    if obstacle := next(filter(None, run.world.gather(problem)), None):
        raise RankFailedError(
            f"the reference can't be written to {folder.reference}: {obstacle}. Make room, and try again"
        )
