"""Only matrices decay, frozen parameters are left out, and the learning rate follows its warm-up and cosine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, GptOssConfig, PretrainedConfig, get_scheduler

from slipstream.errors import SlipstreamError
from slipstream.train.config import OptimizerSection
from slipstream.train.optimizers import (
    check_arguments,
    check_schedule,
    lr_ratio,
    make_optimizer,
    make_scheduler,
    try_optimizer,
)


def test_only_matrices_decay_and_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    decayed, plain = make_optimizer(model.named_parameters(), OptimizerSection(weight_decay=0.2)).param_groups
    assert decayed["weight_decay"] == 0.2
    assert plain["weight_decay"] == 0
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert [p.shape for p in plain["params"]] == [(4,), (4,), (4,)]


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (
            GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_hidden_layers=1, vocab_size=64, pad_token_id=0),
            {"mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"},
        ),
        (
            CohereConfig(**SIZES, use_qk_norm=True, num_hidden_layers=1, vocab_size=64, pad_token_id=0, eos_token_id=1),
            {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
        ),
    ],
    ids=["biases of experts", "norms of heads"],
)
def test_norms_and_biases_of_two_dimensions_do_not_decay(config: PretrainedConfig, plain: set[str]) -> None:
    model = AutoModelForCausalLM.from_config(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, rest = make_optimizer(model.named_parameters(), OptimizerSection()).param_groups
    assert {names[id(matrix)] for matrix in rest["params"] if matrix.ndim > 1} == {f"model.layers.0.{n}" for n in plain}
    matrices = {names[id(parameter)] for parameter in decayed["params"]}
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= matrices


def test_the_learning_rate_rises_in_a_line_and_falls_in_a_cosine() -> None:
    settings = OptimizerSection(warmup_steps=4, min_lr_ratio=0.1)
    ratios = [lr_ratio(step, 24, settings) for step in range(25)]
    assert ratios[:4] == [0.25, 0.5, 0.75, 1.0]
    assert ratios[4] == 1.0
    assert ratios[14] == pytest.approx(0.55)
    assert ratios[24] == pytest.approx(0.1)
    assert ratios[4:] == sorted(ratios[4:], reverse=True)
    assert lr_ratio(20, 24, OptimizerSection(schedule="constant")) == 1.0


def test_the_scheduler_starts_with_the_first_warm_up_step() -> None:
    settings = OptimizerSection(lr=1.0, warmup_steps=4)
    optimizer = make_optimizer([("", nn.Parameter(torch.zeros(2, 2)))], settings)
    scheduler = make_scheduler(optimizer, settings, num_steps=10)
    assert scheduler.get_last_lr()[0] == 0.25


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("linear", {}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("polynomial", {"power": 2.0}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr": "1e-5"}),
        ("warmup_stable_decay", {"num_decay_steps": 5}),
    ],
)
def test_schedules_of_transformers_are_its_own_to_the_bit(name: str, arguments: dict[str, Any]) -> None:
    settings = OptimizerSection(lr=1e-3, schedule=name, schedule_args=arguments, warmup_steps=3)
    check_schedule(settings, 20)
    ours, theirs = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3) for _ in range(2))
    mine = make_scheduler(ours, settings, 20)
    plain = get_scheduler(name, theirs, 3, 20, {key: float(value) for key, value in arguments.items()})
    for _ in range(20):
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        for optimizer, scheduler in ((ours, mine), (theirs, plain)):
            optimizer.step()
            scheduler.step()


def _check(settings: dict[str, Any]) -> None:
    """What is checked before ranks start."""
    made = OptimizerSection(**settings)
    check_arguments(made)
    try_optimizer(made, {1, 2})
    check_schedule(made, 20)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "lion"}, "optimizer.name=lion isn't in torch.optim"),
        ({"name": "nowhere.Lion"}, "can't be imported (ModuleNotFoundError: No module named 'nowhere')"),
        ({"name": "os.path"}, "isn't a subclass of torch.optim.Optimizer"),
        ({"name": "sgd", "betas": (0.9, 0.9)}, "SGD takes no betas, but lr, momentum"),
        ({"name": "sgd", "args": {"momentun": 0.9}}, "optimizer.args.momentun=0.9 with optimizer.name=sgd"),
        ({"args": {"lr": 1.0}}, "give it as optimizer.lr"),
        ({"betas": (0.9, 0.9), "args": {"betas": [0.9, 0.9]}}, "say the same"),
        ({"schedule": "constant", "min_lr_ratio": 0.5}, "doesn't use it"),
        ({"name": "lbfgs"}, "needs a closure"),
        ({"name": "muon"}, "Muon only supports 2D parameters"),
        ({"name": "sparseadam"}, "does not support dense gradients"),
        ({"schedule": "greedy"}, "follows the losses of a run; give constant"),
        ({"schedule": "polynomial", "schedule_args": {"powr": 2}}, "it takes lr_end, power"),
        ({"schedule": "warmup_stable_decay"}, "num_decay_steps"),
    ],
)
def test_what_cannot_train_is_refused_with_what_can(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SlipstreamError) as error:
        _check(settings)
    assert words in str(error.value)


class NormedByAll(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        super().step(closure)


@pytest.mark.parametrize(
    ("name", "reach"),
    [
        *((name, "element") for name in ("adamw", "adam", "sgd", "nadam", "radam", "adamax", "adadelta", "adagrad")),
        *((name, "element") for name in ("rmsprop", "rprop", "asgd")),
        ("adafactor", "parameter"),
        ("transformers.optimization.Adafactor", "parameter"),
        (f"{__name__}.NormedByAll", "model"),
    ],
)
def test_a_trial_shows_how_much_an_optimizer_must_see(name: str, reach: str) -> None:
    assert try_optimizer(OptimizerSection(name=name), {1, 2}).reach == reach
