"""The documentation's pages are linked, current, and have what they say they have."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.zoo import page as models_page
from tools import cli_page, configuration_page, walks

import slipstream
from benchmarks import plan_requests, records, zero3_page
from slipstream.option_errors import records_in
from slipstream.schedule import SCHEDULES
from slipstream.train.config import Config
from support.changes import page as own_models
from support.forked import run_alone
from support.paths import ROOT

README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GROUPS = ["Start", "Train", "Fine-tune", "Your own loop", "Scale", "Operate", "Concepts", "Reference", "Evidence"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:src|tests|benchmarks|examples|docs|tools)/[\w./-]+)`")


def test_the_readme_is_short() -> None:
    text = README.read_bytes()
    assert text.count(b"\n") <= 110
    assert len(text) <= 6500


def navigation() -> dict[str, list[str]]:
    """Returns the site's pages by their group."""
    return {name: [page for _, page in entries] for name, entries in menu().items()}


def menu() -> dict[str, list[tuple[str, str]]]:
    """Returns the site's entries and their pages by their group."""
    lines = (ROOT / "mkdocs.yml").read_text().splitlines()
    begin = lines.index("nav:")
    end = next(i for i in range(begin + 1, len(lines)) if not lines[i].startswith(" "))
    groups = yaml.safe_load("\n".join(lines[begin:end]))["nav"]
    return {
        name: [entry for each in pages for entry in each.items()] for group in groups for name, pages in group.items()
    }


def test_the_navigation_has_every_page_once() -> None:
    assert [*navigation()] == GROUPS
    assert sorted(chain(*navigation().values())) == [page.name for page in PAGES]


def test_no_two_entries_of_the_menu_read_alike() -> None:
    entries = [entry for entries in menu().values() for entry, _ in entries]
    assert len({*entries}) == len(entries)


def test_an_image_takes_nothing_along_that_git_leaves_out() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", *ignored} <= {line.removeprefix("**/") for line in left_out}


def test_the_lists_of_guides_share_an_order() -> None:
    """The README's list and the one on the first page have some of the navigation's pages, in its order."""
    pages = [*chain(*navigation().values())]
    for text in (
        README.read_text().partition("- **Start:**")[2],
        (DOCS / "index.md").read_text().partition("## Where")[2],
    ):
        listed = [link.removeprefix("docs/") for link in LINK.findall(text) if link.endswith(".md")]
        listed = [page for page in listed if page in pages]
        assert len(listed) > 15
        assert listed == [page for page in pages if page in listed]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_stay_in_the_documentation(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target = link.partition("#")[0]
        if "://" in link or not target:
            continue
        assert (DOCS / target).is_file(), link
        assert (DOCS / target).resolve().is_relative_to(DOCS), link


def test_links_of_the_readme_exist() -> None:
    for link in LINK.findall(README.read_text(encoding="utf-8")):
        assert "://" in link or (ROOT / link.partition("#")[0]).is_file(), link


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    missing = [path for path in PATH.findall(page.read_text(encoding="utf-8")) if not (ROOT / path).exists()]
    assert [path for path in missing if "NAME" not in path] == []


def test_every_record_has_its_subject_and_its_sources() -> None:
    """A subject may still lack its record: a record says which sources it is of, so its subject comes first."""
    written = {path.stem for path in records.RESULTS.glob("*.json")}
    assert written <= set(records.SUBJECTS)
    page = records.PAGE.read_text(encoding="utf-8")
    assert page.count("| not measured |") == len(set(records.SUBJECTS) - written)


def test_the_page_of_records_is_current() -> None:
    """Otherwise: `python -m benchmarks.records`."""
    text = records.PAGE.read_text(encoding="utf-8")
    assert records.with_tables(text) == text


def test_the_page_of_zero3_has_the_recorded_tables() -> None:
    """Otherwise: `python -m benchmarks.zero3 --page`."""
    text = zero3_page.PAGE.read_text(encoding="utf-8")
    for name, content in zero3_page.tables(json.loads((records.RESULTS / "zero3.json").read_text())).items():
        assert zero3_page.MARK.format(name) + content in text


def recorded_requests() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((records.RESULTS / f"{plan_requests.NAME}.json").read_text())
    return found


def test_the_page_of_where_slices_win_has_the_recorded_plans() -> None:
    """Otherwise: `python -m benchmarks.plan_requests --page`."""
    text = plan_requests.PAGE.read_text(encoding="utf-8")
    assert records.with_parts(text, plan_requests.tables(recorded_requests())) == text


def test_slices_win_where_the_page_says_so() -> None:
    expected = {each.command: (each.situation, each.slices_win) for each in plan_requests.REQUESTS}
    rows = recorded_requests()["rows"]
    assert [row["command"] for row in rows] == [*expected]
    assert {win for _, win in expected.values()} == {plan_requests.slices_win(row) for row in rows}
    for row in rows:
        assert (row["situation"], plan_requests.slices_win(row)) == expected[row["command"]]


@pytest.mark.parametrize("name", models_page.PAGES)
def test_the_pages_of_models_have_the_recorded_tables(name: str) -> None:
    """Otherwise: `python -m benchmarks.zoo --page`."""
    text = models_page.PAGES[name].read_text(encoding="utf-8")
    assert models_page.with_table(name, text, json.loads((records.RESULTS / "zoo.json").read_text())["rows"]) == text


def test_a_record_is_older_once_a_source_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    source = tmp_path / "src" / "module.py"
    source.parent.mkdir()
    source.write_text("one = 1\n")
    record = {"of": {"sources": ["src"], "sha256": records.digest(records.read_sources(["src"]))}}
    assert records.is_current(record)
    source.write_text("one = 2\n")
    assert not records.is_current(record)


def test_the_page_of_commands_is_current() -> None:
    """Otherwise: `python -m tools.cli_page`."""
    assert cli_page.PAGE.read_text(encoding="utf-8") == cli_page.page()


def test_the_page_of_the_configuration_is_current() -> None:
    """Otherwise: `python -m tools.configuration_page`."""
    assert configuration_page.PAGE.read_text(encoding="utf-8") == configuration_page.page()
    assert configuration_page.PIPELINE_PAGE.read_text(encoding="utf-8") == configuration_page.pipeline_page()
    assert configuration_page.COMING_FROM.read_text(encoding="utf-8") == configuration_page.coming_from()


def test_the_tables_of_changed_models_are_current() -> None:
    """Otherwise: `PYTHONPATH=tests python -m support.changes.page`."""
    assert own_models.PAGE.read_text(encoding="utf-8") == own_models.page()


@pytest.mark.parametrize("name", [name for name, field in Config.model_fields.items() if not field.is_required()])
def test_the_page_of_the_configuration_has_every_setting_as_it_is_typed(name: str) -> None:
    """Typed as they stand there, the defaults make the section that there is without."""
    pages = configuration_page.PAGE, configuration_page.PIPELINE_PAGE
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    _, _, section = text.partition(f"\n## {name}\n")
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| `([^|]*)` \| [^|]", section.partition("\n## ")[0], re.MULTILINE)
    (record,) = records_in(Config.model_fields[name].annotation)
    assert [key for key, _ in rows] == [*record.model_fields]
    assert record(**{key: yaml.safe_load(value) for key, value in rows if name != "pipeline"}) == record()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.more) for name in walks.WALKS])
def test_the_pictures_of_the_walks_show_what_calls_what(name: str) -> None:
    """Otherwise: `python -m tools.walks`."""
    calls = walks.record(name, partial(run_alone, Path(walks.__file__)))
    assert walks.picture(name).read_text(encoding="utf-8") == walks.draw(walks.WALKS[name], calls)


def test_a_station_that_a_walk_no_longer_comes_to_is_named() -> None:
    lost = "pipeline/runtime.py:PipelineRuntime.prepare"
    walk = replace(walks.WALKS["step"], stations=(*walks.WALKS["step"].stations, lost))
    with pytest.raises(RuntimeError, match=f"doesn't come to {lost}"):
        walks.check_stations(walk, [walks.Call(station, None) for station in walks.WALKS["step"].stations])


def test_the_page_of_the_api_has_every_public_name() -> None:
    named = re.findall(r"^::: slipstream\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(slipstream.__all__)


def test_the_architecture_has_the_packages_in_the_order_of_their_imports() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.MULTILINE)]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each for each in contracts if each["type"] == "layers")["layers"]
    assert [*reversed(rows)] == [layer.split(" : ") for layer in layers]


PAGE = ROOT / "docs" / "schedules.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def test_what_the_page_shows_is_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    shown = 0
    for code, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        exec(code, names)
        printed = capsys.readouterr().out
        assert text == printed
        shown += bool(printed)
    assert shown > len(SCHEDULES)


def test_every_schedule_has_a_section_and_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in SCHEDULES:
        assert f"\n## {name}\n" in text
        assert f"\n| `{name}` | " in text
