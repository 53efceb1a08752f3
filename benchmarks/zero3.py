"""ZeRO-3 (FSDP2 alone) next to PTD-P: bytes and seconds of a step on few processes.

    python -m benchmarks.zero3                  # prints tables, writes results/zero3.json
    python -m benchmarks.zero3 --page           # writes the tables of docs/zero3.md from that record and `papers`

Every world trains the same model on the same sequences: `fully_shard` of every layer and the root, against pipelines of
some pp x dp x tp. Bytes are those of one step of all ranks, counted where collectives and messages are called. Where
there are more processes than cores, seconds say nothing about the systems: they are recorded, and marked.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import tokens
from benchmarks.harness import RESULTS, few, interleaved, medians, restart_in_environment, setting, write
from benchmarks.isolated import Contender
from benchmarks.papers.zero3 import exchanged, zero3_bytes
from benchmarks.peers import model_config, whole_model
from slipstream import Pipeline, Runtime, make_mesh

WORLDS = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(4, 1, 1), (2, 2, 1), (2, 1, 2)]}  # pp, dp, tp
CASES = [(2, 2), (2, 8), (4, 8)]  # processes, sequences
LENGTH, SLICES = 1024, 4
TIMES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # (n-1)/n of the payload, so often, a rank sends


NAMES = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}


class CountedCollectives(TorchDispatchMode):
    """Counts the bytes that collectives work on, as `slipstream.parallel.RankGroup` does: each one's whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.payload: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name not in NAMES:
                raise RuntimeError(f"{name} is a collective whose bytes aren't counted")
            whole = args[1] if name == "_reduce_scatter_base_" else args[0]
            self.payload[NAMES[name]] += sum(t.nbytes for t in ([whole] if isinstance(whole, Tensor) else whole))
        return func(*args, **(kwargs or {}))


def sent(payload: Counter[str], num_ranks: int) -> float:
    """Returns the bytes that each of these ranks sends, if collectives are rings."""
    return sum(exchanged(num_bytes, num_ranks, TIMES[name]) for name, num_bytes in payload.items())


def shard(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Shards every layer separately, the rest with the root; gathers for each pass, sums gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # the default is one of GPUs where there are some
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # the loss is a global mean already; of this module only
        module.set_force_sum_reduction_for_comms(True)


class Zero3:
    """FSDP2 alone as a contender: every process has different sequences."""

    def __init__(self, sequences: int, length: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        each = sequences // size
        self.inputs = tokens(model_config(length), sequences, length)[rank * each : (rank + 1) * each]
        self.num_valid = sequences * (length - 1)
        self.model = whole_model(model_config(length))
        self.formula = size * zero3_bytes(sum(p.nbytes for p in self.model.parameters()), size)
        shard(self.model, self.model.model.layers)

    def step(self) -> float:
        loss = self._backward()
        dist.all_reduce(loss)
        return float(loss)

    def _backward(self) -> Tensor:
        logits = self.model(input_ids=self.inputs, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), self.inputs[:, 1:].flatten(), reduction="sum")
        loss = loss / self.num_valid
        loss.backward()
        return loss.detach()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def report(self) -> dict[str, float]:
        with CountedCollectives() as counted:
            self._backward()
        collective = in_all(sent(counted.payload, dist.get_world_size()))
        return {"bytes": collective, "formula": self.formula, "sharded": collective, "messages": 0.0}


class Ptdp:
    """dp pipelines of pp ranks as a contender, every layer on tp ranks."""

    def __init__(self, sequences: int, length: int, mesh: tuple[int, int, int]) -> None:
        pp, dp, tp = mesh
        self.each = sequences // dp
        self.mesh, self.length, self.config = mesh, length, model_config(length)
        self.pipe = Pipeline.from_config(
            self.config,
            mesh=make_mesh(pp, dp, tp),
            num_microbatches=self.each,
            slices=SLICES,
            runtime=Runtime(self_check=False),
            seq_len=length,
        )
        self.inputs = tokens(model_config(length), sequences, length)[self.pipe.replica * self.each :][: self.each]

    def step(self) -> float:
        return float(self.pipe.step(self.inputs, self.inputs))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> dict[str, float]:
        before = {axis: Counter(group.payload) for axis, group in self.pipe.axes.items()}
        self.step()
        found = {"messages": in_all(self.pipe.bytes_sent)}
        for axis, group in self.pipe.axes.items():
            found[axis] = in_all(sent(group.payload - before[axis], group.size))
        return {"bytes": sum(found.values()), "formula": self.formula(), **found}

    def formula(self) -> float:
        """Returns the bytes that all ranks send in a step by PTD-P section 2.3, in float32.

        They are messages, the replicas' gradients, and all-reduces: two of each layer in each pass, one of the
        embedding and of the head, and three numbers per token for the loss. A stage's tensor ranks send a message once,
        together; the receivers gather it.
        """
        pp, dp, tp = self.mesh
        hidden, layers = self.config.hidden_size, self.config.num_hidden_layers
        activations = 4 * dp * self.each * self.length * hidden
        messages = 2 * (pp - 1) * (activations + tp * exchanged(activations, tp))
        weights = 4 * sum(parameter.numel() for parameter in whole_model(self.config).parameters())
        of_loss = 3 * 4 * dp * self.each * self.length
        return (
            messages + dp * exchanged(weights, dp, 2) + tp * exchanged((4 * layers + 2) * activations + of_loss, tp, 2)
        )


def in_all(num_bytes: float) -> float:
    """Returns the sum over all processes. Collective."""
    total = torch.tensor(num_bytes, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def compare(num_processes: int, sequences: int, length: int, repeats: int) -> dict[str, object]:
    """Runs both systems on `num_processes`, one after the other."""
    contenders = [Contender("ZeRO-3", Zero3, sequences, length, num_processes=num_processes)]
    for mesh in WORLDS[num_processes]:
        name = " x ".join(f"{axis} {size}" for axis, size in zip(("pp", "dp", "tp"), mesh, strict=True) if size > 1)
        contenders.append(Contender(name, Ptdp, sequences, length, mesh, num_processes=num_processes))
    for contender in contenders:
        contender.wait()
    measured = interleaved({each.name: each.run for each in contenders}, repeats)
    losses = {each.name: each.losses[0] for each in contenders}
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    row = {
        "processes": num_processes,
        "sequences": sequences,
        "tokens": length,
        "more processes than cores": num_processes > (os.cpu_count() or 1),
        "medians": medians(measured),
        "seconds": measured,
        "losses": losses,
        "bytes": {each.name: each.report() for each in contenders},
    }
    for contender in contenders:
        contender.close()
    return row


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['processes']} processes, {row['sequences']} x {row['tokens']} tokens")
    for name, found in row["bytes"].items():
        print(
            f"  {row['medians'][name]:7.3f} s  {found['bytes'] / 1e6:9.3f} MB, by formula {found['formula'] / 1e6:9.3f}"
            f"  {name}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="*", default=sorted(WORLDS))
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="zero3", help="of the file in results/")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/zero3.md and end")
    options = parser.parse_args()
    if options.page:
        from benchmarks.zero3_page import write_page

        write_page(json.loads((RESULTS / "zero3.json").read_text()))
        return
    restart_in_environment()
    rows = []
    for num_processes, sequences in few(CASES):
        if num_processes in options.processes:
            rows.append(compare(num_processes, sequences, options.length, options.repeats))
            show(rows[-1])
    report = {"setting": setting(repeats=options.repeats, slices=SLICES), "rows": rows}
    print(f"wrote {write(options.name, report)}")


if __name__ == "__main__":
    main()
