"""A loss scale grows after good steps, falls after a bad one, and gives up after too many."""

from __future__ import annotations

import json
import math

import pytest

from slipstream.errors import NonFiniteError
from slipstream.train.loss_scale import LossScale


def test_it_grows_after_good_steps_in_a_row_and_falls_after_a_bad_one() -> None:
    scale = LossScale(growth_interval=3)
    seen = []
    for finite in (True, True, False, True, True, True, True, False, False):
        scale.update(finite)
        seen.append(math.log2(scale.scale))
    assert seen == [16, 16, 15, 15, 15, 16, 16, 15, 14]
    assert scale.num_skipped == 3


def test_a_fixed_scale_counts_what_it_skips() -> None:
    scale = LossScale.fixed()
    for finite in [True, False] * 3:
        scale.update(finite)
    assert scale.scale == 1
    assert scale.num_skipped == 3


def test_it_gives_up_after_bad_steps_in_a_row() -> None:
    scale = LossScale(scale=8.0, max_bad=3)
    for finite in (False, False, True, False, False):
        scale.update(finite)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* the loss scale is now 0\.25\. Lower"):
        scale.update(False)


def test_it_resumes() -> None:
    scale = LossScale(growth_interval=3, max_bad=2)
    for finite in (False, True, True):
        scale.update(finite)
    resumed = LossScale(growth_interval=3, max_bad=2)
    resumed.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    for each in (scale, resumed):
        each.update(True)
        assert each.scale == 2.0**16
        each.update(False)
        assert each.num_skipped == 2
        with pytest.raises(NonFiniteError):
            each.update(False)
