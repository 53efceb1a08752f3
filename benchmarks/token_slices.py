"""Two processes on long sequences: token slices against torch.distributed.pipelining and against one process.

    python -m benchmarks.token_slices                  # prints tables, writes results/token_slices.json

A step is forward and backward, its time the slower rank's. Every contender has separate processes. They take
turns of a few steps, so that other load on the machine affects all of them alike; ratios are of medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from benchmarks.harness import interleaved, medians, restart_in_environment, setting, write
from benchmarks.isolated import Contender
from benchmarks.peers import VOCABULARY, mean_loss, model_config, torch_pipeline, whole_model
from benchmarks.waterfall import bound, waterfall
from slipstream import Pipeline, Runtime
from slipstream.timeline import Timeline

CUT = [4, 4]
TURNS_CUT = [0, 0.5, 2, 3, 2.5, 0]  # three stages a rank, in turns: the embedding alone, ..., the head alone
TURNS_SLICES = [6, 10, 11, 5]  # 32nds of the sequence
INTERLEAVED_CUT = [2, 2, 2, 2]
ONE_STAGE = ("torch gpipe", "torch 1f1b")
INTERLEAVED = "torch interleaved 1f1b"
ZERO_BUBBLE = "torch interleaved zero-bubble"
AT_ONCE = "two processes, a sequence each"
SLICED_AT_ONCE = "two processes, a sequence each in 8 slices"


def ours(length: int) -> dict[str, dict[str, object]]:
    """Returns the ways to run one sequence."""
    slices = [length * part // 32 for part in TURNS_SLICES]
    return {
        "whole": {"slices": 8, "partition": CUT},
        "auto": {"slices": "auto", "schedule": "auto"},
        "turns": {"slices": slices, "schedule": "auto", "stages_per_rank": 3, "partition": TURNS_CUT},
    }


def tokens(batch: int, length: int) -> Tensor:
    """Returns random tokens, which are inputs and unshifted targets."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


def shifted(inputs: Tensor) -> Tensor:
    """Returns targets for the peers' loss: the last token of a row predicts nothing."""
    return torch.cat([inputs[:, 1:], torch.full_like(inputs[:, :1], -100)], dim=1)


class Unsliced:
    """transformers' model in one process, one sequence after the other."""

    def __init__(self, batch: int, length: int) -> None:
        self.inputs = tokens(batch, length)
        self.model = whole_model(model_config(length))

    def step(self) -> float:
        return sum(self._add(row) for row in self.inputs.split(1))

    def _add(self, row: Tensor) -> float:
        logits = self.model(input_ids=row, use_cache=False).logits
        loss = mean_loss(logits, shifted(row)) / len(self.inputs)
        loss.backward()
        return float(loss.detach())

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def report(self) -> None:
        return None


class Peer:
    """torch.distributed.pipelining as a contender."""

    def __init__(self, schedule: str, num_microbatches: int, batch: int, length: int) -> None:
        inputs = tokens(batch, length)
        cut = INTERLEAVED_CUT if "interleaved" in schedule else CUT
        self._step, self._parameters = torch_pipeline(
            schedule, model_config(length), cut, num_microbatches, inputs, shifted(inputs)
        )

    def step(self) -> float | None:
        return self._step()

    def parameters(self) -> Iterable[nn.Parameter]:
        return self._parameters

    def report(self) -> None:
        return None


class Ours:
    """Slipstream as a contender; with "auto" it has chosen before its first step counts."""

    def __init__(self, batch: int, length: int, settings: dict[str, object]) -> None:
        self.inputs = tokens(batch, length)
        self.pipe = Pipeline.from_config(
            model_config(length), runtime=Runtime(self_check=False), seq_len=length, **settings
        )
        while self.pipe.is_tuning:
            for parameter in self.pipe.parameters():
                parameter.grad = None
            self.step()

    def step(self) -> float:
        return float(self.pipe.step(self.inputs, self.inputs))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> tuple[Timeline, object, list[int], list[float]]:
        layout = self.pipe.layout
        cut = [stage.stop - stage.start for stage in layout.layers]
        return self.pipe.timeline(), layout.training, self.pipe.slices(self.inputs.shape[1]), cut


def alone(batch: int, length: int, slices: Sequence[int]) -> list[Contender]:
    """Returns the contenders in one process: unsliced by transformers, and in slices by Slipstream."""
    contenders = [Contender("one process, unsliced", Unsliced, batch, length, num_processes=1)]
    for count in slices:
        settings = {"slices": count, "schedule": "gpipe", "num_microbatches": batch}
        contenders.append(Contender(f"one process, {count} slices", Ours, batch, length, settings, num_processes=1))
    return contenders


def one_sequence(length: int, rounds: dict[str, int], ways: Sequence[str], apart: bool) -> dict[str, object]:
    """Compares all contenders on one sequence; torch's 1F1B is missing, as it refuses one microbatch on two stages."""
    contenders = [
        Contender(name, Peer, name.removeprefix("torch "), 1, 1, length)
        for name in ("torch gpipe", INTERLEAVED, ZERO_BUBBLE)
    ]
    contenders += alone(1, length, (4,))
    if apart:
        contenders += [
            Contender(AT_ONCE, Unsliced, 1, length, apart=True),  # they share no data: what the cores cost each other
            Contender(SLICED_AT_ONCE, Ours, 1, length, {"slices": 8, "schedule": "gpipe"}, apart=True),
        ]
    contenders += [Contender(f"slipstream, {way}", Ours, 1, length, ours(length)[way]) for way in ways]
    return compare(1, length, contenders, rounds)


def several_sequences(batch: int, length: int, rounds: dict[str, int], fewer: Sequence[int]) -> dict[str, object]:
    """Compares all with one microbatch per sequence, and torch without zero-bubble also with the numbers in `fewer`."""
    names = (*ONE_STAGE, INTERLEAVED, ZERO_BUBBLE)
    contenders = [Contender(name, Peer, name.removeprefix("torch "), batch, batch, length) for name in names]
    contenders += [
        Contender(f"{name}, microbatches: {count}", Peer, name.removeprefix("torch "), count, batch, length)
        for name in names[:-1]
        for count in fewer
        if count > 1 or name != "torch 1f1b"  # which refuses a single one on two stages
    ]
    auto = {"slices": "auto", "schedule": "auto", "num_microbatches": batch}
    contenders += [
        Contender("one process, unsliced", Unsliced, batch, length, num_processes=1),
        Contender("slipstream, auto", Ours, batch, length, auto),
    ]
    return compare(batch, length, contenders, rounds)


def compare(batch: int, length: int, contenders: list[Contender], rounds: dict[str, int]) -> dict[str, object]:
    for contender in contenders:
        contender.wait()
    measured = interleaved({each.name: each.run for each in contenders}, **rounds)
    middle = medians(measured)
    ours = min((each for each in contenders if each.name.startswith("slip")), key=lambda each: middle[each.name])
    timeline, schedule, slices, cut = ours.report()  # type: ignore[misc]
    report = {
        "tokens": length,
        "sequences": batch,
        "medians": middle,
        "seconds": measured,
        "losses": {each.name: each.losses for each in contenders},
        "best": ours.name,
        "slices": slices,
        "layers": cut,
        "schedule": str(schedule),
        "over": ratios(middle, ours.name),
        "most over one process": most_over_one_process(middle) if AT_ONCE in middle else None,
        "bound": bound(timeline, schedule),
        "of the bound": bound(timeline, schedule) / timeline.makespan,  # of the same step
        "waterfall": waterfall(timeline, schedule, middle["one process, unsliced"], measured[ours.name][-1]),
    }
    for contender in contenders:
        contender.close()
    return report


def ratios(middle: dict[str, float], ours: str) -> dict[str, float]:
    """Returns the ratio of each group's fastest to our best."""
    groups = {
        "torch, one stage a rank": ONE_STAGE,
        "torch gpipe, 1f1b, interleaved 1f1b": (*ONE_STAGE, INTERLEAVED),
        "torch interleaved zero-bubble": (ZERO_BUBBLE,),
        "one process": ("one process",),
    }
    return {
        group: min(seconds for name, seconds in middle.items() if name.startswith(begins)) / middle[ours]
        for group, begins in groups.items()
    }


def most_over_one_process(middle: dict[str, float]) -> dict[str, float]:
    """Returns how much faster than one process a pipeline without a bubble would be on these two cores."""
    best = min(middle[name] for name in middle if name.startswith("one process"))
    return {name: 2 * best / middle[name] for name in (AT_ONCE, SLICED_AT_ONCE)}


def show(row: dict[str, object]) -> None:
    print(
        f"\n{row['sequences']} x {row['tokens']} tokens; {row['best']}: layers {row['layers']}, slices {row['slices']}"
    )
    for name, seconds in sorted(row["medians"].items(), key=lambda item: item[1]):  # type: ignore[attr-defined]
        print(f"  {seconds:7.3f} s  {name}")
    for group, ratio in row["over"].items():  # type: ignore[attr-defined]
        print(f"  {ratio:7.3f} x over {group}")
    for name, ratio in (row["most over one process"] or {}).items():  # type: ignore[attr-defined]
        print(f"  {ratio:7.3f} x over one process is the most that both cores can give, by {name}")
    print(f"  {row['of the bound']:7.3f} of the bound {row['bound']:.3f} s")
    for cause, seconds in row["waterfall"].items():  # type: ignore[attr-defined]
        print(f"  {seconds:7.3f} s  {cause}", flush=True)


def check_losses(row: dict[str, object]) -> None:
    """Checks that all contenders computed the same loss."""
    losses = [loss for each in row["losses"].values() for loss in each]  # type: ignore[attr-defined]
    assert max(losses) - min(losses) < 1e-3, row["losses"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096], help="of the single sequence")
    parser.add_argument("--sequences", type=int, nargs="*", default=[2, 4, 8], help="of --batch-length tokens each")
    parser.add_argument("--batch-length", type=int, default=1024)
    parser.add_argument("--fewer", type=int, nargs="*", default=[], help="microbatches torch may choose from as well")
    parser.add_argument(
        "--ours", nargs="*", default=[*ours(0)], choices=[*ours(0)], help="ways to run the single sequence"
    )
    parser.add_argument("--apart", action="store_true", help="also two processes that share nothing: 4 GiB more")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=3, help="rounds before, which don't count")
    parser.add_argument("--steps", type=int, default=3, help="of a turn; the first of several doesn't count")
    parser.add_argument("--name", default="token_slices", help="of the file in results/")
    options = parser.parse_args()
    restart_in_environment()
    rounds = {"repeats": options.repeats, "warmups": options.warmups, "steps": options.steps}
    rows = []
    cases = [(1, length) for length in options.lengths]
    cases += [(batch, options.batch_length) for batch in options.sequences]
    for batch, length in cases:
        if batch == 1:
            row = one_sequence(length, rounds, options.ours, options.apart)
        else:
            row = several_sequences(batch, length, rounds, options.fewer)
        rows.append(row)
        show(row)
        check_losses(row)
        path = write(options.name, {"setting": setting(**rounds), "rows": rows})
        print(f"wrote {path}", flush=True)


if __name__ == "__main__":
    main()
