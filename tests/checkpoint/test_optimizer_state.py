"""Whatever an optimizer keeps of parameters is saved and loaded: of any class, by any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from slipstream import Pipeline
from slipstream.checkpoint import Checkpoints, Manifest, load_training, training_shards
from slipstream.errors import SlipstreamError
from slipstream.parallel import ParameterShard, ParameterShare, RankGroup
from support.architectures import ARCHITECTURES, labels_of, tokens
from support.checkpoints.optimizers import OPTIMIZERS, SignedMomentum
from support.forked import launch
from support.parameters import first_of
from support.paths import ROOT
from support.pipelines import make_pipe

WORKER = ROOT / "tests" / "workers" / "checkpoint" / "optimizer_states.py"


def pipeline(num_ranks: int, seed: int) -> Pipeline:
    return make_pipe(ARCHITECTURES["llama"], seed=seed, slices=2, num_ranks=num_ranks, dtype=torch.float64)


def train(pipe: Pipeline, optimizer: Optimizer, *steps: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        pipe.step(tokens(seed=step), labels_of(tokens(seed=step)))
        optimizer.step()


def save(folder: Path, parts: Iterable[ParameterShard], optimizer: Optimizer) -> Checkpoints:
    checkpoints = Checkpoints(folder, RankGroup())
    checkpoints.save(1, list(training_shards(parts, optimizer)), {})
    checkpoints.wait()
    return checkpoints


def load(checkpoints: Checkpoints, parts: Iterable[ParameterShard], optimizer: Optimizer) -> None:
    saved = checkpoints.find()
    assert saved is not None
    load_training(checkpoints, saved, parts, optimizer)


@pytest.mark.parametrize("name", first_of(OPTIMIZERS, 2))
def test_one_rank_goes_on_from_what_two_had(name: str, tmp_path: Path) -> None:
    pipe = pipeline(2, seed=0)
    optimizer = OPTIMIZERS[name](pipe.parameters())
    train(pipe, optimizer, 1, 2)
    checkpoints = save(tmp_path, pipe.parameter_shards(), optimizer)
    train(pipe, optimizer, 3)
    other = pipeline(1, seed=1)
    again = OPTIMIZERS[name](other.parameters())
    load(checkpoints, other.parameter_shards(), again)
    train(other, again, 3)
    here = other.state_dict()
    assert all(tensor.equal(here[key]) for key, tensor in pipe.state_dict().items())


@pytest.mark.more
def test_processes_go_on_alike_on_any_mesh(tmp_path: Path) -> None:
    result = launch(2, WORKER, tmp_path, *OPTIMIZERS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("alike: ") == 2 * len(OPTIMIZERS)


def test_adamw_keeps_the_keys_of_earlier_checkpoints(tmp_path: Path) -> None:
    part = whole("weight", 4, 3)
    optimizer = updated(torch.optim.AdamW, part)
    save(tmp_path, [part], optimizer)
    tensors = Manifest.read(tmp_path / "step-00000001").tensors
    assert {key: tensor.shape for key, tensor in tensors.items()} == {
        "model.weight": (4, 3),
        "optimizer.step.weight": (),
        "optimizer.exp_avg.weight": (4, 3),
        "optimizer.exp_avg_sq.weight": (4, 3),
    }


def test_state_that_is_not_in_the_checkpoint_goes(tmp_path: Path) -> None:
    """As where a run goes back to a checkpoint from before its first update."""
    part = whole("weight", 4, 3)
    checkpoints = save(tmp_path, [part], torch.optim.AdamW([part.parameter]))
    optimizer = updated(torch.optim.AdamW, part)
    assert optimizer.state
    load(checkpoints, [part], optimizer)
    assert not optimizer.state


def test_tensors_that_fit_are_filled_in_place(tmp_path: Path) -> None:
    part = whole("weight", 4, 3)
    optimizer = updated(torch.optim.AdamW, part)
    checkpoints = save(tmp_path, [part], optimizer)
    moment = optimizer.state[part.parameter]["exp_avg"]
    before = moment.clone()
    moment.zero_()
    load(checkpoints, [part], optimizer)
    assert optimizer.state[part.parameter]["exp_avg"] is moment
    assert moment.equal(before)


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    part = whole("weight", 4, 3)
    checkpoints = save(tmp_path, [part], updated(SignedMomentum, part))
    optimizer = SignedMomentum([part.parameter])
    load(checkpoints, [part], optimizer)
    state = optimizer.state[part.parameter]
    assert [type(state[kind]) for kind in ("count", "rate")] == [int, float]
    assert (state["count"], state["rate"], state["warm"].tolist()) == (1, 0.9, [0.5])


def test_factors_of_a_whole_matrix_are_kept(tmp_path: Path) -> None:
    part = whole("weight", 4, 3)
    optimizer = updated(torch.optim.Adafactor, part)
    checkpoints = save(tmp_path, [part], optimizer)
    again = torch.optim.Adafactor([part.parameter])
    load(checkpoints, [part], again)
    before, after = optimizer.state[part.parameter], again.state[part.parameter]
    assert before.keys() == after.keys()
    assert after["row_var"].shape == (4, 1)
    assert all(before[kind].equal(after[kind]) for kind in before)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_an_update_by_the_whole_matrix_is_refused_of_a_part(kind: type[Optimizer], tmp_path: Path) -> None:
    checkpoints = save(tmp_path, [whole("weight", 4, 3)], updated(SignedMomentum, whole("weight", 4, 3)))
    part = rows("weight", 4, 3)
    optimizer = kind([part.parameter])
    with pytest.raises(SlipstreamError, match=f"{kind.__name__} updates a matrix by all .* part of weight. Split"):
        list(training_shards([part], optimizer))
    with pytest.raises(SlipstreamError, match=f"{kind.__name__} updates a matrix by all"):
        load(checkpoints, [part], optimizer)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("factor", torch.ones(4), r"keeps 'factor' of weight, of shape \(4,\), and this rank has only .* Use only pp"),
        ("a.b", torch.ones(()), "keeps 'a.b' of weight.* names without a dot"),
        ("old", [1.0], "keeps 'old' of weight, a list, which a checkpoint can't hold"),
        ("none", None, "keeps 'none' of weight, a NoneType, which"),
    ],
)
def test_state_that_no_other_mesh_could_load_is_refused(kind: str, value: object, message: str) -> None:
    part = rows("weight", 4, 3)
    optimizer = SignedMomentum([part.parameter])
    optimizer.state[part.parameter][kind] = value
    with pytest.raises(SlipstreamError, match=f"SignedMomentum {message}"):
        list(training_shards([part], optimizer))


def test_factors_of_a_whole_matrix_are_refused_where_it_is_cut(tmp_path: Path) -> None:
    part = whole("weight", 4, 3)
    optimizer = SignedMomentum([part.parameter])
    optimizer.state[part.parameter]["factor"] = torch.ones(4)
    checkpoints = save(tmp_path, [part], optimizer)
    cut = rows("weight", 4, 3)
    before = cut.parameter.detach().clone()
    with pytest.raises(SlipstreamError, match=r"optimizer.factor.weight has shape \(4,\) in it, .* cut here. Use only"):
        load(checkpoints, [cut], SignedMomentum([cut.parameter]))
    assert cut.parameter.equal(before)


def whole(name: str, *shape: int) -> ParameterShard:
    """A parameter of one rank."""
    parameter = nn.Parameter(torch.arange(12.0).view(shape))
    return ParameterShard(name, parameter, ParameterShare.whole(shape), 0, leads=True)


def rows(name: str, *shape: int) -> ParameterShard:
    """The first half of a parameter."""
    parameter = nn.Parameter(torch.ones(shape[0] // 2, *shape[1:]))
    return ParameterShard(name, parameter, ParameterShare.whole(shape), 0, leads=True)


def updated(kind: Callable[[Iterable[nn.Parameter]], Optimizer], part: ParameterShard) -> Optimizer:
    """An optimizer after its first step."""
    optimizer = kind([part.parameter])
    part.parameter.grad = torch.ones_like(part.parameter)
    optimizer.step()
    return optimizer
