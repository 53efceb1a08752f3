"""One long sequence on two processes: token slices against torch.distributed.pipelining and against one process.

    python -m benchmarks.token_slices                  # prints tables, writes results/token_slices.json

Everything runs in turns in one run; a step is forward and backward, its time the slower rank's, ratios are of medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness import interleaved, medians, restart_in_environment, setting, write
from benchmarks.peers import VOCABULARY, mean_loss, model_config, torch_pipeline, whole_model
from slipstream import Pipeline

CUT = [4, 4]
INTERLEAVED_CUT = [2, 2, 2, 2]
# Equal slices, and slices that grow: the first fills the pipeline, so it is short, and each next is longer by no more
# than the second stage, with its head, is slower. Matrix products like multiples of 64 rows.
SLICES = {
    2048: [[256] * 8, [128, 192, 256, 320, 384, 384, 384]],
    4096: [
        [512] * 8,
        [192, 320, 448, 576, 640, 640, 640, 640],
        [128, 192, 256, 320, 384, 448, 448, 448, 448, 512, 512],
    ],
}
Step = Callable[[], float | None]


class Runner:
    """Times steps on both ranks, or on rank 0 alone while the other waits, and compares their losses."""

    def __init__(self, alone: DeviceMesh) -> None:
        self.alone = alone
        self.losses: dict[str, float] = {}

    def timed(self, name: str, step: Step, parameters: Iterable[nn.Parameter]) -> Callable[[], float]:
        held = list(parameters)

        def run() -> float:
            for parameter in held:
                parameter.grad = None
            dist.barrier()
            began = time.perf_counter()
            loss = step()
            dist.barrier()
            seconds = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if loss is not None:
                self.losses[name] = loss
            return float(seconds)

        return run


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and unshifted targets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    return inputs, inputs


def shifted(inputs: Tensor) -> Tensor:
    """Targets for the peers' loss: the last token of a row predicts nothing."""
    return torch.cat([inputs[:, 1:], torch.full_like(inputs[:, :1], -100)], dim=1)


def ours(runner: Runner, name: str, inputs: Tensor, **settings: object) -> Callable[[], float]:
    pipe = Pipeline.from_config(model_config(inputs.shape[1]), self_check=False, **settings)
    return runner.timed(name, lambda: float(pipe.step(inputs, inputs)), pipe.parameters())


def one_process(runner: Runner, inputs: Tensor, slices: Iterable[int]) -> dict[str, Callable[[], float]]:
    """Rank 0 alone: unsliced by transformers' own code, and in slices by ours."""
    contenders = {}
    model = whole_model(model_config(inputs.shape[1]))

    def unsliced() -> float | None:
        if dist.get_rank() != 0:
            return None
        loss = mean_loss(model(input_ids=inputs, use_cache=False).logits, shifted(inputs))
        loss.backward()
        return float(loss)

    contenders["one process, unsliced"] = runner.timed("one process, unsliced", unsliced, model.parameters())
    for num_slices in slices:
        name = f"one process, {num_slices} slices"
        pipe = Pipeline.from_config(
            model_config(inputs.shape[1]), self_check=False, slices=num_slices, mesh=runner.alone
        )

        def sliced(pipe: Pipeline = pipe) -> float | None:
            return float(pipe.step(inputs, inputs)) if dist.get_rank() == 0 else None

        contenders[name] = runner.timed(name, sliced, pipe.parameters())
    return contenders


def peers(
    runner: Runner, inputs: Tensor, schedules: Iterable[str], microbatches: Iterable[int]
) -> dict[str, Callable[[], float]]:
    contenders = {}
    for schedule in schedules:
        cut = INTERLEAVED_CUT if "interleaved" in schedule else CUT
        for count in microbatches:
            name = f"torch {schedule}" + (f", {count} microbatches" if inputs.shape[0] > 1 else "")
            try:
                step, parameters = torch_pipeline(
                    schedule, model_config(inputs.shape[1]), cut, count, inputs, shifted(inputs)
                )
            except ValueError as error:  # interleaving wants a multiple of the ranks
                if dist.get_rank() == 0:
                    print(f"{name} is refused: {error}", flush=True)
                continue
            contenders[name] = runner.timed(name, step, parameters)
    return contenders


def one_sequence(runner: Runner, length: int, repeats: int) -> dict[str, object]:
    inputs, _ = tokens(1, length)
    contenders = peers(runner, inputs, ["gpipe", "1f1b", "interleaved 1f1b", "interleaved zero-bubble"], [1])
    contenders |= one_process(runner, inputs, (4, 8))
    for slices in SLICES.get(length, [8]):
        name = f"slipstream, slices {slices}"
        contenders[name] = ours(runner, name, inputs, slices=slices, partition=CUT)
    measured = interleaved(contenders, repeats, warmups=3)
    middle = medians(measured)
    best = min((name for name in middle if name.startswith("slipstream")), key=middle.__getitem__)

    def least(*starts: str) -> float:
        return min(seconds for name, seconds in middle.items() if name.startswith(starts))

    return {
        "tokens": length,
        "sequences": 1,
        "medians": middle,
        "seconds": measured,
        "losses": runner.losses,
        "best": best,
        "over torch gpipe, 1f1b, interleaved 1f1b": least("torch gpipe", "torch 1f1b", "torch interleaved 1f1b")
        / middle[best],
        "over torch interleaved zero-bubble": least("torch interleaved zero-bubble") / middle[best],
        "over one process": least("one process") / middle[best],
    }


def eight_sequences(runner: Runner, length: int, repeats: int) -> dict[str, object]:
    inputs, _ = tokens(8, length)
    contenders = peers(runner, inputs, ["gpipe", "1f1b", "interleaved 1f1b"], [1, 2, 4, 8])
    for num_microbatches, num_slices in ((8, 1), (8, 2), (4, 2), (4, 4), (2, 4)):
        name = f"slipstream, {num_microbatches} microbatches, {num_slices} slices"
        contenders[name] = ours(
            runner, name, inputs, slices=num_slices, num_microbatches=num_microbatches, partition=CUT
        )
    measured = interleaved(contenders, repeats, warmups=1)
    middle = medians(measured)
    best = min((name for name in middle if name.startswith("slipstream")), key=middle.__getitem__)
    peer = min((name for name in middle if name.startswith("torch")), key=middle.__getitem__)
    return {
        "tokens": length,
        "sequences": 8,
        "medians": middle,
        "seconds": measured,
        "losses": runner.losses,
        "best": best,
        "best peer": peer,
        "over the best peer": middle[peer] / middle[best],
    }


def show(row: dict[str, object]) -> None:
    print(f"\n{row['sequences']} x {row['tokens']} tokens")
    for name, seconds in sorted(row["medians"].items(), key=lambda item: item[1]):  # type: ignore[attr-defined]
        print(f"  {seconds:7.3f} s  {name}")
    for key, value in row.items():
        if key.startswith("over"):
            print(f"  {value:7.3f} x {key}", flush=True)


def check_losses(losses: dict[str, float]) -> None:
    """All contenders computed the same thing."""
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096])
    parser.add_argument("--batch-length", type=int, default=512, help="tokens of each of the 8 sequences; 0: leave out")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="token_slices", help="of the file in results/")
    options = parser.parse_args()
    restart_in_environment(num_processes=2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "pp"))["pp"]
    rows = []
    for length in options.lengths:
        rows.append(one_sequence(Runner(alone), length, options.repeats))
        if dist.get_rank() == 0:
            show(rows[-1])
            check_losses(rows[-1]["losses"])
    if options.batch_length:
        rows.append(eight_sequences(Runner(alone), options.batch_length, options.repeats))
        if dist.get_rank() == 0:
            show(rows[-1])
    if dist.get_rank() == 0:
        print(f"wrote {write(options.name, {'setting': setting(repeats=options.repeats), 'rows': rows})}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
