"""Rows of a data set, read as they are used, in blocks from which reading can go on later."""

from __future__ import annotations

from itertools import islice
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.training.config import SourceSection
from slipstream.training.data.rows import find_bad_line, open_rows, row_files, with_given_keys

State = dict[str, Any]


class RowStream:
    """The rows of a source in their order, `block_rows` at a time, epoch after epoch; none spans two epochs."""

    def __init__(self, source: SourceSection, block_rows: int) -> None:
        """Raises SlipstreamError where the data set can't be read, or is empty."""
        self._source, self._block_rows = source, block_rows
        self._epoch, self._num_read = 0, 0  # rows of this epoch
        self._open()
        first = self._read(1)
        if not first:
            raise SlipstreamError(f"{source.name} holds no row; give a data set with at least one")
        self.columns = [*first[0]]
        self._open()

    @property
    def facts(self) -> dict[str, Any]:
        """What decides which rows come when: of a file its size, too."""
        source, sizes = self._source, [file.stat().st_size for file in row_files(self._source)]
        what = source.dataset if source.files is None else source.name
        return {"stream": f"{what}/{source.dataset_config}/{source.split}", "bytes": sum(sizes) if sizes else None}

    def state(self) -> State:
        """Returns what `go_to` needs to go on with the next block, as JSON can hold it."""
        return {"epoch": self._epoch, "num_read": self._num_read, "rows": self._rows.state_dict()}

    def go_to(self, state: State) -> None:
        """Goes on where `state` was taken."""
        self._epoch, self._num_read = state["epoch"], state["num_read"]
        self._open(state["rows"])

    def next_block(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns the next rows, and which they are in words."""
        rows = self._read(self._block_rows)
        if not rows:
            self._epoch, self._num_read = self._epoch + 1, 0
            self._open()
            rows = self._read(self._block_rows)
        first, self._num_read = self._num_read + 1, self._num_read + len(rows)
        return f"{self._source.name}, rows {first:,} to {self._num_read:,}", rows

    def _open(self, state: Any = None) -> None:
        self._rows = open_rows(self._source)
        if state is not None:
            self._rows.load_state_dict(state)
        self._iterator = iter(self._rows)

    def _read(self, number: int) -> list[dict[str, Any]]:
        try:
            return [*with_given_keys(islice(self._iterator, number), self._rows.features)]
        except Exception as error:  # `datasets` raises many types; all mean that it can't be read
            where = f"after row {self._num_read:,}" if self._num_read else "from its beginning"
            if line := find_bad_line(row_files(self._source)):
                raise SlipstreamError(f"{self._source.option}={line}") from error
            raise SlipstreamError(f"can't read {self._source.name} {where}: {error}") from error
