"""An optimizer on the host trains to the bit as one on the device, and the device holds nothing of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import Memory, Parallelism, Pipeline, SlipstreamError
from slipstream.parallel.host_link import HostLink, sum_of_squares
from support.adapters import adapted, lora
from support.architectures import ARCHITECTURES, build, labels_of, llama, tokens
from support.parameters import first_of
from support.pipelines import make_pipe

BF16 = {"dtype": torch.bfloat16, "master_dtype": torch.float32}
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


def own_divisor(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counted = targets != -100
    losses = nn.functional.cross_entropy(outputs[counted].float(), targets[counted], reduction="sum")
    return 0.3 * losses, 0.3 * counted.sum().float()


class Loop:
    """A pipeline, of a model or a configuration, and its optimizer."""

    def __init__(self, model: Any, make: Any = AdamW, **settings: Any) -> None:
        self.pipe = make_pipe(model, **{"slices": 2, "num_microbatches": 2} | settings)
        self.optimizer = make([p for p in self.pipe.parameters() if p.requires_grad], lr=1e-2)

    def train(self, *steps: int, **options: Any) -> list[float]:
        """Returns the loss and the norm of each step; the gradients are clipped in every other one."""
        found = []
        for step in steps:
            self.optimizer.zero_grad()
            inputs = tokens(batch=4, seed=step)
            found += [float(self.pipe.step(inputs, labels_of(inputs), **options))]
            found += [float(self.pipe.clip_grad_norm_(0.5 if step % 2 else 1e9))]
            self.optimizer.step()
        return found

    def state(self) -> dict[str, Tensor]:
        masters = {f"{name}'s master": parameter for name, parameter in self.pipe.named_parameters()}
        return self.pipe.state_dict() | masters


def check_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("llama, tied", partial(AdamW, fused=True), {"num_ranks": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}),
    ("llama", partial(AdamW, foreach=True), BF16 | {"num_ranks": 2, "schedule": "zb-h1"}),
    ("gpt2", partial(SGD, momentum=0.9), {"dtype": torch.bfloat16}),
    ("mixtral", AdamW, {"recompute": "full", "num_ranks": 2}),
    ("llama", AdamW, {"loss_fn": own_divisor}),
    ("llama, tied", AdamW, {"num_ranks": 2, "vocabulary": "spread"}),
]


@pytest.mark.parametrize(("name", "make", "settings"), first_of(CASES, 3))
def test_weights_and_norms_are_those_of_an_optimizer_on_the_device(
    name: str, make: Any, settings: dict[str, Any]
) -> None:
    loops = {}
    for place in ("device", "host"):
        given = {"dtype": torch.float32} | settings | {"optimizer": place}
        loops[place] = Loop(ARCHITECTURES[name], make, **given)
    assert loops["device"].train(1, 2) == loops["host"].train(1, 2)
    assert loops["device"].train(3, loss_scale=8.0) == loops["host"].train(3, loss_scale=8.0)
    check_equal(loops["device"].state(), loops["host"].state())


def test_an_adapter_trains_there_and_its_base_stays() -> None:
    loops = [Loop(adapted(lora()), optimizer=place) for place in ("device", "host")]
    assert loops[0].train(1, 2) == loops[1].train(1, 2)
    check_equal(loops[0].state(), loops[1].state())
    own = {id(parameter) for stage in loops[1].pipe._runtime.stages.values() for parameter in stage.model.parameters()}
    assert {id(p) in own for p in loops[1].pipe.parameters() if p.requires_grad} == {False}
    assert {id(p) in own for p in loops[1].pipe.parameters() if not p.requires_grad} == {True}


def test_layers_of_ones_own_train_there() -> None:
    found = []
    for place in ("device", "host"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        pipe = Pipeline(
            model,
            num_ranks=2,
            partition=[2, 1],
            loss_fn=lambda y, t: ((y - t).square().sum(), len(t)),
            memory=Memory(optimizer=place),
        )
        optimizer = AdamW(pipe.parameters(), lr=1e-2)
        inputs = torch.linspace(-1, 1, 32).view(8, 4)
        for _ in range(2):
            optimizer.zero_grad()
            pipe.step(inputs, inputs.flip(0))
            optimizer.step()
        found.append(pipe.state_dict())
    check_equal(*found)


@pytest.mark.parametrize("before", ["device", "host"])
def test_a_checkpoint_goes_on_with_the_other(before: str, tmp_path: Path) -> None:
    after = {"device": "host", "host": "device"}[before]
    loop = Loop(llama(), **BF16, optimizer=before)
    loop.train(1, 2)
    loop.pipe.save(tmp_path, 2, optimizer=loop.optimizer)
    expected = loop.train(3)
    again = Loop(llama(), **BF16, optimizer=after, num_ranks=2, seed=1)
    again.pipe.load(tmp_path, optimizer=again.optimizer)
    assert again.train(3) == expected
    check_equal(loop.state(), again.state())


def test_gradients_of_several_steps_are_added_up() -> None:
    """As with replicas, a step's sum is added to those before, so in other digits than one after the other."""
    loop, other = Loop(llama(), optimizer="host", dtype=torch.float64), Loop(llama(), dtype=torch.float64)
    for seed in range(2):
        for each in (loop, other):
            each.pipe.step(tokens(seed=seed), tokens(seed=seed))
    expected = {name: parameter.grad for name, parameter in other.pipe.named_parameters()}
    for name, parameter in loop.pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(loop.pipe.clip_grad_norm_(1.0), other.pipe.clip_grad_norm_(1.0))


def test_gradients_lie_beside_the_copies_alone() -> None:
    loop = Loop(llama(), optimizer="host", **BF16)
    loop.train(1)
    own = [parameter for stage in loop.pipe._runtime.stages.values() for parameter in stage.model.parameters()]
    assert all(parameter.grad is None for parameter in own)
    for parameter in loop.pipe.parameters():
        assert parameter.grad is not None
        assert (parameter.device.type, parameter.grad.device.type) == ("cpu", "cpu")
        assert parameter.grad.dtype == torch.float32
    assert "bfloat16, updated in float32 on the host" in repr(loop.pipe)


def test_a_table_of_memory_has_none_of_it() -> None:
    tables = [
        Loop(llama(), optimizer=place, **BF16, num_ranks=2).pipe.memory_table(tokens(batch=4), tokens(batch=4))
        for place in ("device", "host")
    ]
    assert sum(tables[0].optimizer.values()) > 0
    assert sum(tables[1].optimizer.values()) == 0
    copies = {g: size - tables[1].parameters[g] for g, size in tables[0].parameters.items()}
    assert all(2 * size == tables[0].optimizer[g] for g, size in copies.items())
    assert tables[0].gradients == tables[1].gradients


def test_a_norm_that_was_taken_is_not_kept_for_another_gradient() -> None:
    link, gradient = HostLink(torch.device("cpu")), torch.arange(4.0)
    taken = link.take("weight", gradient)
    assert link.square_of("weight", taken) == 14
    taken += 1
    assert link.square_of("weight", taken) == 30
    link.take("weight", taken)
    assert link.square_of("weight", torch.ones(4)) == 4
    assert link.square_of("bias", torch.ones(3)) == 3


def test_large_tensors_are_squared_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.parallel.host_link._BLOCK", 7)
    for tensor in (torch.randn(5, 9), torch.randn(5, 9).t(), torch.eye(3).to_sparse(), torch.randn(())):
        torch.testing.assert_close(sum_of_squares(tensor), tensor.to_dense().double().square().sum())


def test_freezing_later_is_refused() -> None:
    loop = Loop(llama(), optimizer="host")
    next(loop.pipe.parameters()).requires_grad_(False)
    with pytest.raises(SlipstreamError, match=r"was changed\. With an optimizer that is sharded or on the host"):
        loop.train(1)


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises(
        SlipstreamError, match=r"optimizer='host' with parallel.shard='parameters'.*Use parallel.shard="
    ):
        Pipeline(build(llama()), memory=Memory(optimizer="host"), parallel=Parallelism(shard="parameters"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """Gradients are copied out on a stream of their own; a race would change numbers."""
    found = []
    for place in ("device", "host", "host"):
        loop = Loop(llama(), optimizer=place, **BF16, num_ranks=2, device="cuda")
        inputs = tokens(batch=4).cuda()
        for _ in range(3):
            loop.optimizer.zero_grad()
            loop.pipe.step(inputs, inputs)
            loop.pipe.clip_grad_norm_(0.5)
            loop.optimizer.step()
        found.append(loop.state())
        assert {parameter.device.type for parameter in loop.pipe.parameters()} == {"cpu" if place == "host" else "cuda"}
    for name, tensor in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name].cpu(), tensor.cpu(), rtol=0.02, atol=0.01)
