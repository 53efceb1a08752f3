"""Cases of data_parallel.py: what the optimizer updates, in which dtype, and when it must not."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream import Parallelism, make_mesh
from slipstream.parallel import RankGroup
from slipstream.parallel.gradients import GradientReduction, LossScale, MasterParameters
from support.architectures import ARCHITECTURES, build, no_rounding_inside, unsplit_step
from support.parallel.replica import ROWS, Replica, batch, local_loss, none_partial, world
from support.pipelines import make_pipe


@no_rounding_inside()
def three_steps_of_adamw() -> None:
    """Sharded, replicated and alone: the same parameters, on every replica the very same; the state is shared out."""
    whole = build(ARCHITECTURES["llama"], seed=3)
    alone = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    data = world()
    for seed in range(3):
        alone.zero_grad()
        unsplit_step(whole, *batch(seed, data.size))
        alone.step()
    sizes = {}
    for shard in (False, True):
        replica = Replica(build(ARCHITECTURES["llama"], seed=3), data, shard)
        optimizer = replica.train(3)
        for (name, wanted), found in zip(whole.named_parameters(), replica.model.parameters(), strict=True):
            assert ((found - wanted).abs().max() / wanted.abs().max()) < 1e-9, name
            assert torch.equal(data.all_gather(found.detach()), found.expand(data.size, *found.shape)), name
        sizes[shard] = moment_bytes(optimizer)
    total = sum(2 * p.nbytes for p in whole.parameters())
    assert sizes[False] == total
    assert sum(data.gather(sizes[True])) == total
    assert sizes[True] < 1.05 * total / data.size


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))


def sharded_and_replicated_to_the_bit() -> None:
    """In float32, where two replicas' sums are the same whatever adds them; more may add in another order."""
    data = world()
    trained = []
    for shard in (False, True):
        replica = Replica(build(ARCHITECTURES["llama"]).float(), data, shard)
        replica.train(3)
        trained.append(dict(replica.model.named_parameters()))
    for name, parameter in trained[0].items():
        if data.size == 2:
            assert torch.equal(parameter, trained[1][name]), name
        assert torch.allclose(parameter, trained[1][name], rtol=1e-3, atol=1e-4), name


def slices_are_added_in_float32() -> None:
    """Of parameters in bfloat16 with float32 masters: as float64 adds what reaches each layer, on all replicas."""
    for name in ("llama", "gpt2"):
        for shard in (False, True):
            data = world()
            replica = Replica(build(ARCHITECTURES[name]).bfloat16(), data, shard, torch.float32)
            inputs, labels = batch(0, data.size)
            replica.gradients.begin()
            expected = expected_gradients(replica.model)
            for start in range(0, 24, 6):  # as slices are, though these don't attend to those before
                piece = slice(start, start + 6)
                local_loss(replica.model, inputs[:, piece], labels[:, piece], data).backward()
            replica.reduce()
            found = dict(replica.masters.named_parameters())
            for key, wanted in expected.items():
                total = replica.own(data.sum(wanted), key)
                gradient = found[key].grad
                assert gradient.dtype == torch.float32
                error, rounded = ((other - total).abs().max() for other in (gradient, total.bfloat16()))
                bound = 1e-5 * total.abs().max()
                assert error < bound < rounded or not gradient.any(), (key, error, rounded)
                assert gradient.any() == total.any(), key  # not of positions that no slice has
            assert all(parameter.grad is None for parameter in replica.model.parameters())


def expected_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, what the coming backwards add up to in float64, filled as they run."""
    expected = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    totals = {id(p): expected[name] for name, p in model.named_parameters()}
    for module in model.modules():
        multiplies = isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        for key, parameter in module.named_parameters(recurse=False):
            total = totals[id(parameter)]
            if not multiplies:
                parameter.register_hook(adding(total))
            else:
                module.register_forward_hook(adding_products(total, module) if key == "weight" else adding_sums(total))
    return expected


def adding(total: Tensor) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        total.add_(gradient)

    return hook


def adding_sums(total: Tensor) -> Callable[..., None]:
    def hook(_: nn.Module, _args: tuple[Tensor], output: Tensor) -> None:
        output.register_hook(lambda g: adding(total)(g.double().flatten(0, -2).sum(0)))

    return hook


def adding_products(total: Tensor, module: nn.Module) -> Callable[..., None]:
    def product(x: Tensor, g: Tensor) -> Tensor:
        if isinstance(module, nn.Embedding):
            return torch.zeros_like(total).index_add_(0, x.flatten(), g)
        return x.double().flatten(0, -2).t() @ g if isinstance(module, Conv1D) else g.t() @ x.double().flatten(0, -2)

    def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        x = args[0].detach()
        output.register_hook(lambda g: adding(total)(product(x, g.double().flatten(0, -2))))

    return hook


def masters_keep_small_updates() -> None:
    """Steps that bfloat16 rounds away add up in the masters; the parameters are the masters, rounded."""
    for shard in (False, True):
        replica = Replica(build(ARCHITECTURES["llama"]).bfloat16(), world(), shard, torch.float32)
        before = {name: master.clone() for name, master in replica.masters.named_parameters()}
        optimizer = replica.adamw(lr=1e-6)
        for _ in range(2):
            replica.step(0)
            optimizer.step()
            replica.masters.publish()
        for name, master in replica.masters.named_parameters():
            moved = (master - before[name]).abs().max()
            assert 1e-7 < moved < 1e-5, (name, moved)
            parameter = dict(replica.model.named_parameters())[name]
            assert torch.equal(replica.own(parameter.detach(), name), master.detach().bfloat16())
            everywhere = replica.data.all_gather(parameter.detach())
            assert all(torch.equal(parameter, other) for other in everywhere), name


class Short(nn.Module):
    """Parameters of fewer rows than replicas, of rows that do not divide, of none, and of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"scalar": (), "one": (1, 3), "three": (3,), "seven": (7, 2)}.items():
            values = torch.randn(shape, dtype=torch.float64, generator=generator)
            self.register_parameter(name, nn.Parameter(values))
        self.register_parameter("narrow", nn.Parameter(torch.ones(5)))

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(parameter.double().pow(3).sum() for parameter in self.parameters())


def short_parameters_are_on_some_replicas() -> None:
    data = world()
    for dtype in (None, torch.float64):
        model, whole = Short(), Short()
        masters = MasterParameters([*model.named_parameters()], data, True, dtype)
        assert ("scalar" in dict(masters.named_parameters())) == (data.rank == 0)
        assert all(master.ndim == whole.get_parameter(name).ndim for name, master in masters.named_parameters())
        reduced = GradientReduction({0: [*model.named_parameters()]}, data, RankGroup(), none_partial, masters)
        optimizers = [
            torch.optim.AdamW([p for _, p in named], lr=1e-2)
            for named in (masters.named_parameters(), whole.named_parameters())
        ]
        for x in torch.tensor([1.0, 0.3], dtype=torch.float64):
            reduced.begin()
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(x * (data.rank + 1)).backward()
            reduced.reduce(0)
            reduced.finish()
            whole(x * sum(range(1, data.size + 1))).backward()
            for optimizer in optimizers:
                optimizer.step()
            masters.publish()
        for name, parameter in model.named_parameters():
            wanted = whole.get_parameter(name)
            bound = 1e-12 if wanted.dtype == torch.float64 else 1e-6
            assert ((parameter - wanted).abs() <= bound * wanted.abs()).all(), (name, dtype)
        assert sum(data.gather(len(masters.rows("seven")))) == 7


def all_ranks_skip_the_same_step() -> None:
    """One gradient of one rank isn't finite: nobody steps, the scale halves; the next step is good everywhere."""
    everyone = world()
    pipe = make_pipe(
        build(ARCHITECTURES["llama"]).half(),
        mesh=make_mesh(1, everyone.size, 1),
        parallel=Parallelism(shard_optimizer=True),
        master_dtype=torch.float32,
    )
    scale, optimizer = LossScale(scale=2.0**8), torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    mine = slice(ROWS * everyone.rank, ROWS * (everyone.rank + 1))
    for step in range(2):
        optimizer.zero_grad()
        inputs, labels = batch(step, everyone.size)
        pipe.step(inputs[mine], labels[mine], loss_scale=scale.scale)
        if step == 0 and everyone.rank == everyone.size - 1:
            next(iter(pipe.parameters())).grad[0, 0] = math.nan
        finite = bool(pipe.clip_grad_norm_(1.0).isfinite())
        scale.update(finite)
        if finite:
            optimizer.step()
        assert everyone.gather(finite) == [step == 1] * everyone.size
        unmoved = all(torch.equal(old, new) for old, new in zip(before, pipe.parameters(), strict=True))
        assert unmoved == (step == 0)
    assert scale.scale == 2.0**7
    assert scale.num_skipped == 1
