"""The failures of a run that starts from its checkpoints: where one repeats, an earlier checkpoint is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class FailureLog:
    """The file at `path`, with a line for each failure by numbers that aren't finite. Used on rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, step: int, started_after: int) -> None:
        """Appends that a run which began after the step `started_after` has failed in `step`."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "started_after": started_after}) + "\n")

    def earlier_than(self) -> int | None:
        """Returns the step before which a checkpoint must be to lead elsewhere: that from which the last failure came,
        where it was the second in the same step or more; None where it was the first."""
        lines = self._lines()
        is_repeated = sum(line["step"] == lines[-1]["step"] for line in lines) > 1
        return int(lines[-1]["started_after"]) if is_repeated else None

    def _lines(self) -> list[dict[str, Any]]:
        """Returns the lines; the last may have been cut off when a run ended."""
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
