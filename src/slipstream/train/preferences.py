"""Training on preferences: pairs of answers, the loss that compares them, and the reference model's part."""

from __future__ import annotations

import json
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

from slipstream.errors import RankFailedError, SlipstreamError
from slipstream.pipeline import Pipeline
from slipstream.pipeline.pipeline_options import SequenceLoss
from slipstream.train.config import Config, PreferenceSection
from slipstream.train.data import BatchSize, HeldOutBatches, PreferencePairs, TokenisedText, load_texts
from slipstream.train.data.tokenised_text import Array
from slipstream.train.run_context import RunContext
from slipstream.train.run_state import describe_base, describe_text
from slipstream.train.training_step import Evaluator
from slipstream.units import plural


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


Texts = Mapping[str, Sequence[TokenisedText]]  # of each part, train and validation, that of every source


def load_with_reference(run: RunContext, pipe: Pipeline, resumes: bool) -> dict[str, list[Any]]:
    """Returns the texts of a run, `train` and `validation`, each document with its log-probability by the reference,
    which is the model as the pipeline has it now. Collective.

    A run that resumes reads what its beginning computed.

    Raises:
        SlipstreamError: on all ranks, where a run resumes and that isn't there, or is of other answers or weights.
        RankFailedError: on all ranks, where it can't be written.
    """
    config, folder, progress = run.config, run.folder, run.progress
    texts = {part: load_texts(folder.inputs, part) for part in ("train", "validation")}
    if resumes:
        check_reference(config, texts)
        return _with_values(texts, _read(folder.reference))
    named = {f"{part}-{number}": text for part, each in texts.items() for number, text in enumerate(each)}
    total, size = sum(text.num_documents // 2 for text in named.values()), BatchSize.of(config.training)
    with progress.counting("computing the reference", total) as show:
        found = log_probabilities(Evaluator(pipe, config), named.values(), size, show)
    values = dict(zip(named, found, strict=True))
    for text in found:
        if not np.isfinite(text).all():
            number = int(np.flatnonzero(~np.isfinite(text.reshape(-1, 2)).all(1))[0])
            raise SlipstreamError(
                f"the model finds an answer of pair {number + 1} impossible or not a number before the training; check "
                "its weights, or give another --training.precision"
            )
    _write(run, values, _describe(config, texts))
    progress.say(f"computed the reference of {plural(total, 'pair')}, kept in {folder.reference}")
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
            was = json.loads(opened.metadata()["slipstream"])
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
    """Returns what the file of a run has of these very answers, (D,) float64; None where there is none, or it has
    nothing of them."""
    if file is None or not file.is_file():
        return None
    with safe_open(file, framework="np") as opened:
        was = json.loads(opened.metadata()["slipstream"])
        for part in ("train", "validation"):
            if (this := describe_text(text)) in was[part]:
                return np.asarray(opened.get_tensor(f"{part}-{was[part].index(this)}"))
    return None


def _describe(config: Config, texts: Texts) -> dict[str, Any]:
    """Returns what the reference depends on."""
    model, seed = config.model, config.training.seed
    base = describe_base(str(model.path)) if model.pretrained else {"seed": seed}
    return {"base": base, **{part: [describe_text(text) for text in each] for part, each in texts.items()}}


def log_probabilities(
    evaluator: Evaluator, texts: Iterable[TokenisedText], size: BatchSize, show: Callable[[float], None]
) -> list[Array]:
    """Returns those of all documents of each text, (D,) float64. `show` gets the number of pairs that are done.

    Collective.
    """
    pipe, done, found = evaluator.pipe, 0, list[Array]()
    replica = pipe.replica, pipe.num_replicas
    for text in texts:
        if not text.num_documents:
            found.append(np.zeros(0))
            continue
        pairs = PreferencePairs(text, int(text.lengths.max()), seed=None)
        held_out, numbers, parts = HeldOutBatches(pairs, size), list[int](), list[Array]()
        for batch in held_out.chosen():  # the last one begins again with the first pairs
            mine = held_out.batch(batch, *replica)
            evaluator.loss(mine._replace(sequence_values=torch.zeros(len(mine.input_ids), dtype=torch.float64)))
            numbers += pairs.share(*batch, *replica)
            parts.append(pipe.sequence_log_probabilities().cpu().numpy().reshape(-1, 2))
            show(min(done + sum(batch), done + pairs.num_sequences))
        values = np.full((pairs.num_sequences, 2), np.nan)
        for places, each in pipe.axes["dp"].gather((numbers, np.concatenate(parts))):
            values[np.asarray(places) % pairs.num_sequences] = each
        done += pairs.num_sequences
        found.append(values.reshape(-1))
    return found


def _with_values(texts: Texts, values: Mapping[str, Array]) -> dict[str, list[Any]]:
    return {
        part: [replace(text, values=values[f"{part}-{number}"]) for number, text in enumerate(each)]
        for part, each in texts.items()
    }


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
    if found := next(filter(None, run.world.gather(problem)), None):
        raise RankFailedError(
            f"the reference can't be written to {folder.reference}: {found}. Make room, and try again"
        )
