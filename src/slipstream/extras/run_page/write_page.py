"""The page of a run, or of all runs in a folder: one HTML file, which never replaces a file of somebody else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from pathlib import Path

from slipstream.errors import SlipstreamError, path_hint
from slipstream.extras.run_page.run_record import RunRecord, is_run, read_run
from slipstream.extras.run_page.sections import overview, run_sections
from slipstream.html_parts import GENERATOR, html_page
from slipstream.own_files import OwnFolder

_COMMAND = "slipstream runs"
_MOST_DEEP = 3  # levels of folders searched for runs below the given one
_HEAD = 4096  # bytes at a file's beginning with the page's mark


def write_run_page(folder: Path, output: Path | None = None, overwrite: bool = False) -> tuple[Path, int]:
    """Writes the page of a run, or of all runs below a folder; returns its path and the number of runs.

    Args:
        folder: a run's output folder, or one that holds several.
        output: the file; run.html in the folder by default, runs.html for several.
        overwrite: replace a file of that name that isn't such a page.

    Raises:
        SlipstreamError: where there is no run, or the file is somebody else's or can't be written.
    """
    runs, title = _read(folder)
    path = output or folder / ("run.html" if is_run(folder) else "runs.html")
    _check(path, overwrite)
    try:
        with path.open("w", encoding="utf-8") if output else OwnFolder(folder).open(path, "w") as file:
            file.write(run_page(runs, title))
    except OSError as error:
        raise SlipstreamError(f"can't write {path}: {error.strerror}; name another file with --output") from error
    return path, len(runs)


def run_page(runs: Sequence[RunRecord], title: str) -> str:
    """Returns the HTML of one run or of several."""
    code = {name: resources.files("slipstream.extras.run_page").joinpath(name).read_text("utf-8") for name in _CODE}
    made = f"<p class='soft'>Read at {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}.</p>"
    if len(runs) == 1:
        body = f"<article><h1>{escape(title)}</h1>\n{made}\n{run_sections(runs[0])}</article>"
    else:
        body = f"<h1>{escape(title)}</h1>\n{made}\n{overview(runs)}\n" + "\n".join(
            f'<article id="run-{index}"><details><summary>{escape(run.name)}</summary>\n{run_sections(run)}'
            "</details></article>"
            for index, run in enumerate(runs, 1)
        )
    return html_page(title, body, _COMMAND, code["page.css"], code["page.js"])


_CODE = ("page.css", "page.js")


def _read(folder: Path) -> tuple[list[RunRecord], str]:
    if not folder.is_dir():
        raise SlipstreamError(
            f"there is no folder {folder}{path_hint(folder)}; give a run's output folder, or one that holds several"
        )
    folders = list(_find(folder, _MOST_DEEP))
    if not folders:
        raise SlipstreamError(
            f"{folder} holds no run: neither it nor a folder below has a metrics.jsonl; give what training.output was"
        )
    names = [str(path.relative_to(folder)) if path != folder else folder.resolve().name for path in folders]
    title = f"Run {names[0]}" if len(folders) == 1 else f"{len(folders)} runs in {folder.resolve().name}"
    return [read_run(run_folder, name) for run_folder, name in zip(folders, names, strict=True)], title


def _find(folder: Path, deep: int) -> Iterator[Path]:
    """Yields the runs at and below a folder, by their paths; nothing inside of a run is looked for."""
    if is_run(folder):
        yield folder
        return
    inside = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    for child in inside if deep else ():
        yield from _find(child, deep - 1)


def _check(path: Path, overwrite: bool) -> None:
    """Raises SlipstreamError where the file is somebody else's."""
    if not path.parent.is_dir():
        raise SlipstreamError(f"--output={path}: there is no folder {path.parent}; create it first")
    if overwrite or not path.exists():
        return
    mark = GENERATOR.format(_COMMAND).encode()
    if path.is_file():
        with path.open("rb") as file:
            if mark in file.read(_HEAD):
                return
    raise SlipstreamError(
        f"{path} exists and isn't a page of `{_COMMAND}`; name another file with --output, or give --overwrite"
    )
