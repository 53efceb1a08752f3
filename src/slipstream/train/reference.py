"""The log-probabilities of answers by the reference model: computed before the first step, kept in the run folder."""

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

from slipstream.checkpoint import describe_non_finite
from slipstream.errors import RankFailedError, SlipstreamError
from slipstream.foreign_text import parse_json
from slipstream.pipeline import Pipeline
from slipstream.train.config import Config
from slipstream.train.data import BatchSize, HeldOutBatches, PreferencePairs, TokenisedText, load_texts
from slipstream.train.data.tokenised_text import Array
from slipstream.train.preferences import with_lengths
from slipstream.train.run_context import RunContext
from slipstream.train.run_state import describe_base, describe_text
from slipstream.train.training_step import Evaluator
from slipstream.units import plural

Texts = Mapping[str, Sequence[TokenisedText]]  # the sources' texts, by train and validation


def load_with_reference(run: RunContext, pipe: Pipeline, resumes: bool) -> dict[str, list[Any]]:
    """Returns the texts of a run, `train` and `validation`, each document with a further argument of its loss: its
    log-probability by the reference, which is the model as the pipeline has it now, or its lengths. Collective.

    A run that resumes reads those of its beginning.

    Raises:
        SlipstreamError: on all ranks, where a run resumes and that isn't there, or is of other answers or weights.
        RankFailedError: on all ranks, where it can't be written.
    """
    config = run.config
    folder = run.folder
    progress = run.progress
    texts = {"train": run.sequences.texts, "validation": load_texts(folder.inputs, "validation")}
    section = config.preference
    assert section is not None
    if not section.has_reference:
        return {part: [with_lengths(text, section) for text in part_texts] for part, part_texts in texts.items()}
    if resumes:
        check_reference(config, texts)
        return _with_values(texts, _read(folder.reference))
    named = {f"{part}-{index}": text for part, part_texts in texts.items() for index, text in enumerate(part_texts)}
    total = sum(text.num_documents // 2 for text in named.values())
    size = BatchSize.of(config.training)
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
    model = config.model
    seed = config.training.seed
    base = describe_base(str(model.path)) if model.pretrained else {"seed": seed}
    return {"base": base, **{part: [describe_text(text) for text in part_texts] for part, part_texts in texts.items()}}


def log_probabilities(
    evaluator: Evaluator,
    texts: Iterable[TokenisedText],
    size: BatchSize,
    show: Callable[[float], None],
    num_values: int = 0,
) -> list[Array]:
    """Returns the log-probabilities of all documents of each text, (D,) float64, or (D, 2) with those of prompts apart.

    `show` gets the number of pairs that are done; the loss takes `num_values` of each document, 0 for a number. It's
    collective.
    """
    pipe = evaluator.pipe
    done = 0
    computed = list[Array]()
    replica = pipe.replica, pipe.num_replicas
    for text in texts:
        if not text.num_documents:
            computed.append(np.zeros(0))
            continue
        pairs = PreferencePairs(text, int(text.lengths.max()), seed=None)
        held_out = HeldOutBatches(pairs, size)
        numbers = list[int]()
        parts = list[Array]()
        # The last batch begins again with the first pairs.
        for batch in held_out.chosen():
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
    problem = None
    folder = run.folder
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
