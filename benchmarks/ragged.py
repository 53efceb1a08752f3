"""Documents of different lengths on two processes: a plan for every step against padding and against packing.

    python -m benchmarks.ragged                  # prints a table, writes results/ragged.json

The documents are the Python standard library's source files, cut at 8192 tokens. Every contender takes the same ones in
a step. Padding makes all as long as the longest; packing lays them one after the other into rows of one length, with
document masks, and cuts those that don't fit. Contenders take turns, and ratios are of medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from benchmarks.harness import few, interleaved, is_trial, medians, restart_in_environment, setting, write
from benchmarks.isolated import Contender
from slipstream import Pipeline, Runtime
from slipstream.launch import Progress
from slipstream.planner.steps import StageRates, StepProblem, find_step_plan
from slipstream.planner.steps.sliced_step import SlicedStep
from slipstream.planner.steps.step_candidates import lower_bound
from slipstream.schedule import Op, make_schedule
from slipstream.simulator import simulate
from slipstream.timeline import Timeline
from slipstream.training.config import DataSection
from slipstream.training.data import read_documents, tokenise, train_tokenizer

VOCABULARY = 8192
IGNORED = -100
Batch = list[Tensor]


def model_config(longest: int, num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
    )


def documents(longest: int) -> Iterator[Tensor]:
    """Yields the source files of the standard library, in a random order, as tokens."""
    texts = few(read_documents(DataSection(corpus="python-stdlib")), 40)
    tokenised = tokenise(train_tokenizer(texts, VOCABULARY, Progress(None)), texts, Progress(None))
    tokens = [
        torch.from_numpy(tokenised.document(number)[:longest]).long() for number in range(tokenised.num_documents)
    ]
    for number in np.random.default_rng(0).permutation(len(tokens)):
        if len(tokens[number]) > 1:
            yield tokens[number]


def batches(number: int, num_tokens: int, longest: int) -> list[Batch]:
    """Returns steps of exactly `num_tokens` tokens: the last document of each is cut where they end."""
    found: list[Batch] = [[]]
    for document in documents(longest):
        left = num_tokens - sum(map(len, found[-1]))
        found[-1].append(document[:left])
        if len(document) >= left:
            if len(found) == number:
                return found
            found.append([])
    raise SystemExit(f"the standard library has too few tokens for {number} steps of {num_tokens}")


def padded(batch: Batch) -> tuple[Tensor, Tensor, None]:
    """Returns rows as long as the longest document; what pads them counts nowhere."""
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(batch, batch_first=True), pad(batch, batch_first=True, padding_value=IGNORED), None


def packed(batch: Batch, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows of one length, the documents' tokens one after the other, and which document each is of."""
    rows = torch.cat(batch).view(-1, length)
    numbers = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor([*map(len, batch)]))
    return rows, rows, numbers.view(-1, length)


class Rows:
    """Batches as rows of one length: padded to the longest document, or with `length` packed."""

    def __init__(self, batches: list[Batch], length: int | None, config: LlamaConfig, settings: dict[str, Any]):
        self.batches = [padded(batch) if length is None else packed(batch, length) for batch in batches]
        self.pipe = Pipeline.from_config(config, runtime=Runtime(self_check=False), **settings)
        self.step()
        while self.pipe.is_tuning:
            self.step()

    def step(self) -> float:
        losses = [self.pipe.step(inputs, targets, document_ids=ids) for inputs, targets, ids in self.batches]
        return float(torch.stack(losses).mean())

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> Timeline:
        return self.pipe.timeline()


class Documents:
    """Batches as lists of documents, each step planned while the one before runs."""

    def __init__(self, batches: list[Batch], config: LlamaConfig, settings: dict[str, Any]):
        self.batches = batches
        self.pipe = Pipeline.from_config(config, runtime=Runtime(self_check=False), **settings)
        self.step()  # loads what is compiled

    def step(self) -> float:
        losses = []
        for batch, following in pairwise([*self.batches, self.batches[0]]):
            self.pipe.prepare([*map(len, batch)])
            self.pipe.prepare([*map(len, following)])
            losses.append(self.pipe.step(batch, batch))
        return float(torch.stack(losses).mean())

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> Timeline:
        return self.pipe.timeline()


def contenders(batches: list[Batch], longest: int, config: LlamaConfig, num_settings: int) -> dict[str, Contender]:
    """Returns ours, padding and packing, each in several settings."""
    num_tokens, fewest = sum(map(len, batches[0])), min(map(len, batches))
    auto: dict[str, Any] = {"schedule": "auto", "slices": "auto"}
    ours = {"auto": auto, "auto, measured cut": auto | {"seq_len": longest}}
    pads: list[dict[str, Any]] = [
        {"slices": 8, "num_microbatches": fewest},
        {"slices": 4, "num_microbatches": fewest},
        {"slices": 4, "num_microbatches": fewest, "schedule": "interleaved-1f1b", "stages_per_rank": 2},
    ]
    packs: list[tuple[int, dict[str, Any]]] = [
        (longest, auto | {"num_microbatches": num_tokens // longest, "seq_len": longest}),
        (longest, {"slices": 8, "num_microbatches": num_tokens // longest}),
        (longest // 2, {"slices": 4, "num_microbatches": 2 * num_tokens // longest}),
    ]
    chosen = [*ours.items()][:num_settings]
    found = [Contender(f"documents, {name}", Documents, batches, config, way) for name, way in chosen]
    found += [Contender(f"padded, {way}", Rows, batches, None, config, way) for way in pads[:num_settings]]
    for length, way in packs[-num_settings:]:
        found.append(Contender(f"packed to {length}, {way}", Rows, batches, length, config, way))
    return {each.name: each for each in found}


def compare(batches: list[Batch], longest: int, config: LlamaConfig, options: argparse.Namespace) -> dict[str, object]:
    """Returns tokens per second of all, and the ratios of ours to the others' best, with the bounds of these."""
    running = contenders(batches, longest, config, 1 if is_trial() else 3)
    for each in running.values():
        each.wait()
    measured = interleaved({name: each.run for name, each in running.items()}, options.repeats, options.warmups)
    middle = medians(measured)
    idle = {name: each.report().idle_fraction for name, each in running.items()}  # type: ignore[attr-defined]
    losses = {name: each.losses for name, each in running.items()}
    for each in running.values():
        each.close()
    best = {group: min((n for n in middle if n.startswith(group)), key=middle.__getitem__) for group in GROUPS}
    num_tokens = sum(len(document) for batch in batches for document in batch)
    work = {name: multiplications(lengths, config) for name, lengths in row_lengths(batches, best["packed"]).items()}
    return {
        "documents": [[*map(len, batch)] for batch in batches],
        "tokens per second": {name: num_tokens / seconds for name, seconds in middle.items()},
        "seconds": measured,
        "losses": losses,
        "idle in the last step": idle,
        "best": best,
        "over": {group: middle[best[group]] / middle[best["documents"]] for group in GROUPS[1:]},
        # Without a moment's idling ours would do its multiplications as fast as they do theirs while they are busy.
        "at most": {group: work[group] / work["documents"] / (1 - idle[best[group]]) for group in GROUPS[1:]},
        "multiplications": work,
    }


GROUPS = ("documents", "padded", "packed")


def row_lengths(batches: list[Batch], packed_as: str) -> dict[str, list[int]]:
    """Returns the lengths of what attends to itself: documents, padded rows, and the parts of documents in rows."""
    length = int(packed_as.removeprefix("packed to ").partition(",")[0])
    parts = []
    for batch in batches:
        ends = np.cumsum([*map(len, batch)])
        cuts = np.union1d(ends, np.arange(0, ends[-1] + 1, length))
        parts += np.diff(cuts).tolist()
    return {
        "documents": [len(document) for batch in batches for document in batch],
        "padded": [max(map(len, batch)) for batch in batches for _ in batch],
        "packed": parts,
    }


def multiplications(lengths: Sequence[int], config: LlamaConfig) -> float:
    """Returns the multiplications of forwards and backwards: three times those with weights, 3.5 times attention's."""
    width, layers = config.hidden_size, config.num_hidden_layers
    linear = layers * (4 * width**2 + 3 * width * config.intermediate_size) + width * config.vocab_size
    scores = 7.0 * layers * width
    return sum(3.0 * linear * each + scores * each * (each + 1) / 2 for each in lengths)


def planning(num_mixes: int) -> list[dict[str, object]]:
    """Returns how long plans of 64 sequences take to find, of this process's time, and how good they are."""
    random, rows = np.random.default_rng(0), []
    for num_ranks in (2, 4, 8):
        found: list[tuple[float, float, float]] = []
        for _ in range(num_mixes):
            lengths = np.clip(random.lognormal(6.5, 1.2, 64), 16, 8192).astype(int).tolist()
            problem = StepProblem(tuple(lengths), tuple(range(num_ranks)), stage_rates(num_ranks))
            if not found:
                find_step_plan(problem)  # compiles
            began = time.process_time()
            plan = find_step_plan(problem)
            spent = time.process_time() - began
            step = SlicedStep.of(problem, plan.groups, plan.slices)
            assert plan.seconds is not None
            found.append((spent, plan.seconds / lower_bound(problem, step), naive(problem) / plan.seconds))
        spent, bound, over = (median(column) for column in zip(*found, strict=True))
        rows.append({"ranks": num_ranks, "milliseconds": 1e3 * spent, "over its bound": bound, "over naive": over})
    return rows


def stage_rates(num_ranks: int) -> StageRates:
    """Returns rates like those of 8 layers of 512 on a CPU core, with a head that weighs 0.7 layers."""
    layers = 8 / num_ranks
    parts = {Op.F: (1e-3, 1.1e-3 / 100, 4e-9), Op.I: (1e-3, 1.1e-3 / 100, 1e-8), Op.W: (5e-4, 1.1e-3 / 100, 0.0)}
    rates = {op: np.tile(np.array(each) * layers, (num_ranks, 1)) for op, each in parts.items()}
    for op, each in parts.items():
        rates[op][-1, :2] += 0.7 * np.array(each[:2])
    seconds = rates | {Op.B: rates[Op.I] + rates[Op.W]}
    return StageRates(seconds, np.tile([0.0, 3e4 * layers], (num_ranks, 1)), 2048.0, 2e-4, 2e9)


def naive(problem: StepProblem) -> float:
    """Returns the seconds of sequences in their order in 8 groups of as many, in 8 equal slices each, by 1F1B."""
    groups = tuple(tuple(map(int, group)) for group in np.array_split(np.arange(len(problem.lengths)), 8))
    rows = [sum(problem.lengths[number] for number in group) for group in groups]
    slices = [[row // 8 + (index < row % 8) for index in range(8)] for row in rows]
    step = SlicedStep.of(problem, groups, slices)
    return simulate(make_schedule("1f1b", problem.num_ranks, 8, 8), step.costs()).makespan


def show(row: dict[str, object]) -> None:
    for name, rate in sorted(row["tokens per second"].items(), key=lambda item: -item[1]):  # type: ignore[attr-defined]
        print(f"  {rate:8.0f} tokens/s  {name}")
    for group, ratio in row["over"].items():  # type: ignore[attr-defined]
        print(f"  {ratio:8.3f} x over {group}, of at most {row['at most'][group]:.3f}")  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--longest", type=int, default=8192, help="tokens at which documents are cut")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step: a multiple of --longest")
    parser.add_argument("--batches", type=int, default=2, help="steps that are timed together")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=1, help="rounds before, which don't count")
    options = parser.parse_args()
    restart_in_environment()
    plans = planning(len(few(range(9), 2)))
    for each in plans:
        print(", ".join(f"{name} {value:.3g}" for name, value in each.items()), flush=True)
    config = model_config(options.longest, options.layers)
    row = compare(batches(options.batches, options.tokens, options.longest), options.longest, config, options)
    show(row)
    rounds = {"repeats": options.repeats, "warmups": options.warmups, "layers": options.layers}
    print(f"wrote {write('ragged', {'setting': setting(**rounds), 'planning': plans, **row})}")


if __name__ == "__main__":
    main()
