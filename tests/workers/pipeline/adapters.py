"""Cases of test_processes: adapters of PEFT on two stages, on two replicas, and with a sharded optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

from slipstream.parallel import make_mesh
from support.adapters import SLICES, adapted, lora, whole_gradients
from support.architectures import BOUND, gradients, labels_of, no_rounding_inside, tokens
from support.parallel.group_cases import Case
from support.pipelines import make_pipe
from workers.pipeline.ragged_meshes import error


def exact(trained: list[int] | None, axes: dict[str, int], **options: Any) -> None:
    """The gradients of this rank's part are the unsplit model's; `trained` are the layers with an adapter."""
    _, expected = whole_gradients(adapted(lora(layers_to_transform=trained)))
    model = adapted(lora(layers_to_transform=trained))
    pipe = make_pipe(model, "zb-h1", slices=SLICES, mesh=make_mesh(**axes), **options)
    inputs, labels = tokens(), labels_of(tokens())
    mine = slice(pipe.replica, pipe.replica + 1) if "dp" in axes else slice(None)
    with no_rounding_inside():
        pipe.step(inputs[mine], labels[mine])
    assert error(pipe, expected) < BOUND
    num_found = sum(pipe.axes["pp"].gather(len(gradients(pipe))))
    assert options or num_found == len(expected), num_found
    assert float(pipe.clip_grad_norm_(1.0)) > 0


CASES: dict[str, Case] = {}
for layers, trained in (("all", None), ("upper", [3])):
    CASES[f"stages, {layers} layers"] = partial(exact, trained, {"pp": 2})
    CASES[f"replicas, {layers} layers"] = partial(exact, trained, {"dp": 2})
    CASES[f"sharded, {layers} layers"] = partial(exact, trained, {"dp": 2}, shard="optimizer")
