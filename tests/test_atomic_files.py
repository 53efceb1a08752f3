"""Files for other processes are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.atomic_files import replaced_file


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    with replaced_file(file) as part:
        part.write_text("{}")
        assert not file.exists()
    assert [*tmp_path.iterdir()] == [file]


def test_a_folder_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    """The launcher removes the folder of its ranks' last words as it ends; a rank that ends later leaves nothing."""
    removed = tmp_path / "removed"
    with pytest.raises(FileNotFoundError), replaced_file(removed / "error-0.json") as part:
        part.write_text("{}")
    assert not removed.exists()
