"""Every grid has many different settings that fit its model, and "auto" is judged against the best of them."""

from __future__ import annotations

import pytest
from benchmarks.auto_grid import ALONE, AUTO, judged
from benchmarks.auto_grid_models import DEFAULT, MODELS, grid
from benchmarks.contenders import OwnReport, PlannedStep

from slipstream import Schedule, Timeline


@pytest.mark.parametrize("name", MODELS)
def test_a_grid_has_many_settings_that_fit_the_model(name: str) -> None:
    model = MODELS[name]
    settings = grid(model)
    assert model.config().get_text_config().num_hidden_layers == model.num_layers
    assert next(iter(settings)) == DEFAULT
    assert len({str(each) for each in settings.values()}) == len(settings) >= 24
    for each in settings.values():
        partition, slices = each.get("partition", "auto"), each["slices"]
        assert partition == "auto" or (sum(partition) == model.num_layers and len(partition) % 2 == 0)
        assert isinstance(slices, int) or sum(slices) == model.length


def test_auto_is_judged_by_medians_of_all_rounds() -> None:
    seconds = {AUTO: [2.0, 1.0, 3.0], DEFAULT: [3.0, 0.5, 3.0], "by hand": [2.5, 2.5, 1.9]}
    seconds |= {key: [4.0, 4.0, 4.0] for key in ALONE}
    plan = PlannedStep(seconds=1.9, with_own_times=2.0, ideal=1.8, table="a table")
    nothing = Schedule("none", ((),), (0,), 1, 1)
    found = judged(seconds, OwnReport(Timeline((), 1), nothing, "order", [1], [1.0], plan))
    assert found["best of the grid"] == "by hand"
    ratios = [found[key] for key in ("over the best of the grid", "over the default", "over one process")]
    assert ratios == [1.25, 1.5, 2.0]
    assert found["rounds behind the default"] == 1
    assert found["planned over measured"] == 0.95
