"""Where layers are of several kinds, each has the measured costs of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from slipstream.cost import OPS, StateBytes
from slipstream.model import find_anatomy
from slipstream.planner.joint import ProfileUnits
from slipstream.profile import ProfileSettings, profile_model
from slipstream.profile.layer_kinds import anatomy_with_halves, find_layer_kinds, find_unit_kinds
from support.architectures import ARCHITECTURES, build

SETTINGS = ProfileSettings(seq_len=64, longest_slice=32, granularity=8, repeats=2, budget=20.0, few_points=True)
MIXTURE = ARCHITECTURES["qwen2_moe"].to_dict() | {"decoder_sparse_step": 2}
# The kinds of the halves of two layers: a layer with experts attends as a dense one does, one with a window doesn't.
CASES = {
    "a mixture every other layer": (type(ARCHITECTURES["qwen2_moe"]).from_dict(MIXTURE), (0, 1, 0, 2)),
    "a window every other layer": (ARCHITECTURES["gemma2"], (0, 1, 2, 3)),
}


@pytest.mark.parametrize(("config", "halves"), CASES.values(), ids=CASES)
def test_halves_that_are_equal_are_of_one_kind(config: PretrainedConfig, halves: tuple[int, ...]) -> None:
    anatomy = anatomy_with_halves(config)
    kinds, _ = find_layer_kinds(config, anatomy)
    assert find_unit_kinds(config, anatomy, kinds) == halves
    assert find_unit_kinds(config, replace(anatomy, halves=()), kinds) == ()


@pytest.mark.more
@pytest.mark.parametrize(("config", "halves"), CASES.values(), ids=CASES)
def test_each_layer_has_the_costs_of_its_kind(config: PretrainedConfig, halves: tuple[int, ...]) -> None:
    units = ProfileUnits(profile_model(config, SETTINGS, torch.device("cpu")), StateBytes(1, 0, 0))
    assert units.profile.kinds == (0, 1, 0, 1)
    assert len(units.profile.stages) == len(set(halves)) + 3  # the ends, and several parts together
    layers = find_anatomy(config).layers_of(build(config))
    numbers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    per_layer = units.state_bytes()[1:-1].reshape(4, -1)
    np.testing.assert_allclose(per_layer.sum(axis=1), numbers)
    lengths, contexts = np.array([8, 16]), np.array([0, 40])
    for op in OPS:
        first, second, third, fourth = units.seconds(op, lengths, contexts)[0][1:-1].reshape(4, -1, 2)
        np.testing.assert_array_equal(first, third)
        np.testing.assert_array_equal(second, fourth)
        assert not np.array_equal(first, second)
        assert np.array_equal(first[0], second[0]) == (halves[0] == halves[2])
