"""Only matrices decay, frozen parameters are left out, and the learning rate follows its warm-up and cosine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.training.config import OptimizerSection
from slipstream.training.training_step import lr_ratio, make_optimizer, make_scheduler


def test_only_matrices_decay_and_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    decayed, plain = make_optimizer(model.parameters(), OptimizerSection(weight_decay=0.2)).param_groups
    assert decayed["weight_decay"] == 0.2
    assert plain["weight_decay"] == 0
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert [p.shape for p in plain["params"]] == [(4,), (4,), (4,)]


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
    optimizer = make_optimizer([nn.Parameter(torch.zeros(2, 2))], settings)
    scheduler = make_scheduler(optimizer, settings, num_steps=10)
    assert scheduler.get_last_lr()[0] == 0.25
