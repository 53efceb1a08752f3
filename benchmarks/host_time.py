"""What a layer and slice take of the host: Slipstream's, with and without fused kernels, against transformers' layers.

    python -m benchmarks.host_time                  # prints a table, writes results/host_time_cpu.json, or _cuda.json

Two Llama layers so small that kernels take next to nothing, in slices of 8 tokens, forward of all and then backward in
reverse, as a stage of a pipeline runs them: what a slice costs besides its layers is in the times, half for each.
transformers' layers are called by themselves, with plain autograd, on as many tokens. All take turns. The calls of
Python functions don't depend on the machine; those of a backward on a GPU, which has a thread of its own, aren't seen.

Target: with fused kernels less than without.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import LlamaConfig

from benchmarks.gpu_layers import COMPARED, TOY, Layers
from benchmarks.harness import interleaved, medians, name_of, restart_in_environment, setting, wait_for, write
from slipstream.model import check_compiler

TOKENS = 8  # of a slice
SIZES = TOY | {"hidden_size": 64}  # heads of 16, as a GPU's kernels take them
Found = dict[str, dict[str, float]]


@contextmanager
def own_layers(layers: Layers) -> Iterator[None]:
    """Makes the layers those of transformers, without Slipstream's hooks and attention."""
    hooks = [(each, dict(each._forward_pre_hooks), dict(each._forward_hooks)) for each in layers.stage.layers]
    for each, before, after in hooks:
        for key in before:
            del each._forward_pre_hooks[key]
        for key in after:
            del each._forward_hooks[key]
    layers.stage.model.set_attn_implementation("sdpa")
    with layers.without_our_linear_layers():
        yield
    layers.stage.model.set_attn_implementation("slipstream")
    for each, before, after in hooks:
        each._forward_pre_hooks.update(before)
        each._forward_hooks.update(after)


def run_own(layers: Layers) -> float:
    """Returns the seconds of transformers' layers on as many slices, each a sequence of its own."""
    hidden, positions = layers.hidden[:, :TOKENS].detach().requires_grad_(), layers.positions[:, :TOKENS]
    rotary = layers.stage.model.get_submodule("model.rotary_emb")(hidden, positions)
    with own_layers(layers):
        wait_for(layers.device)
        began = time.perf_counter()
        outputs = []
        for _ in range(COMPARED):
            output = hidden
            for layer in layers.stage.layers:
                output = layer(output, position_embeddings=rotary, position_ids=positions)
            outputs.append(output)
        while outputs:
            torch.autograd.backward(outputs.pop(), layers.gradient[:, :TOKENS])
        wait_for(layers.device)
        return time.perf_counter() - began


def python_calls(run: Callable[[], float]) -> int:
    """Returns how many Python functions are called."""
    count = 0

    def called(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    run()
    sys.setprofile(None)
    return count


def measure(device: torch.device, num_layers: int, repeats: int, with_fused: bool = True) -> Found:
    """Returns for each kind of layers its microseconds and calls, of a layer and slice."""
    length = TOKENS * COMPARED
    config = LlamaConfig(**SIZES, num_hidden_layers=num_layers + 2, max_position_embeddings=length)
    kinds = {"eager": False} | ({"fused": True} if with_fused else {})
    ours = {name: Layers(config, num_layers, length, device, torch.bfloat16, fused) for name, fused in kinds.items()}
    contenders = {name: partial(layers.run, [TOKENS] * COMPARED) for name, layers in ours.items()}
    contenders["transformers"] = partial(run_own, ours["eager"])
    seconds = medians(interleaved(contenders, repeats))
    each = num_layers * COMPARED
    return {
        name: {"microseconds": round(1e6 * seconds[name] / each, 1), "calls": round(python_calls(run) / each, 1)}
        for name, run in contenders.items()
    }


def verdicts(found: Found) -> dict[str, bool]:
    """Returns whether the target is reached."""
    fused, eager = (found[name]["microseconds"] for name in ("fused", "eager"))
    return {"fused layers take less of the host than others": fused < eager}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    restart_in_environment()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    check_compiler(device.type)
    found = measure(device, options.layers, options.repeats)
    for name, row in found.items():
        print(f"{name:13} {row['microseconds']:7} us, {row['calls']:6} calls of Python functions")
    reached = verdicts(found)
    print(reached)
    more = setting(repeats=options.repeats, device=name_of(device), layers=options.layers)
    report = {"setting": more, "targets": reached, "layer and slice": found}
    print(f"wrote {write(f'host_time_{device.type}', report)}")


if __name__ == "__main__":
    main()
