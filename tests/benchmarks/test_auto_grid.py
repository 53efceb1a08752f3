"""Every grid has many different settings that fit its model, and "auto" is judged against the best of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.auto_grid import ALONE, AUTO, best_of, judged, row_of
from benchmarks.auto_grid_models import DEFAULT, MODELS, grid
from benchmarks.contenders import OwnReport, PlannedStep

from benchmarks import auto_grid, records
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


def test_a_models_row_goes_on_only_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources, machine and screening; the rows of other models are nobody's business."""
    row = row_of("deep", {}, quick=False)
    assert row_of("deep", {"deep": row, "words": {"of": {}}}, quick=False) is row
    assert row_of("words", {"deep": row}, quick=False)["grid"] == {}
    older = row | {"of": row["of"] | {"sha256": "other"}}
    elsewhere = row | {"setting": row["setting"] | {"cpu": "another"}}
    for other, quick in ((older, False), (elsewhere, False), (row, True)):
        assert row_of("deep", {"deep": other}, quick) is not other
    busier = row | {"setting": row["setting"] | {"load_average": [9.0, 9.0, 9.0]}}
    assert row_of("deep", {"deep": busier}, quick=False) is busier


def test_a_quick_screening_times_each_setting_once_and_leaves_more_to_the_rounds() -> None:
    names = [name for name in grid(MODELS["deep"]) if not name.startswith("auto")]
    found = {name: {"seconds": float(index)} for index, name in enumerate(names)}
    for quick, steps, best in ((False, 2, 4), (True, 1, 6)):
        row = row_of("deep", {}, quick) | {"grid": found}
        assert row["screening"] == {"timed steps": steps, "best": best}
        assert [*best_of(MODELS["deep"], row)] == names[:best]


def test_the_page_says_of_each_model_whether_it_is_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now: dict[str, Any] = row_of("deep", {}, quick=False)
    older = now | {"of": now["of"] | {"sha256": "other", "commit": "abc"}}
    (tmp_path / "auto_grid.json").write_text(json.dumps({"of": now["of"], "models": {"deep": now, "words": older}}))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    page = records.tables()["records"].splitlines()
    deep, words = (line for line in page if line.startswith("| `auto_grid`, "))
    assert deep.startswith("| `auto_grid`, deep |")
    assert deep.endswith("| unchanged |")
    assert words.endswith("| `abc` | changed: **older** |")
    assert auto_grid.summary({"deep": now | {"judged": JUDGED}, "words": older | {"judged": JUDGED}})["older"] == [
        "words"
    ]


JUDGED = {"over the best of the grid": 1.0, "over the default": 1.0, "planned over measured": 1.0}
