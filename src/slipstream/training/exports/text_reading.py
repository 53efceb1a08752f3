"""Reads a file as a training reads its text, and turns it into tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.training.config import DataSection
from slipstream.training.data import TokenisedText, read_documents, tokenise

_TABLES = (".json", ".jsonl", ".parquet")


def read_text(file: Path, column: str, tokenizer: Any, progress: Progress) -> TokenisedText:
    """Returns the tokens of a file: one document, or with a table's ending one in each row's `column`.

    Raises:
        SlipstreamError: where the file can't be read or holds no text.
    """
    if not file.is_file():
        raise SlipstreamError(f"there is no file {file}; give a text, or a table ending in {', '.join(_TABLES)}")
    if file.stat().st_size == 0:
        raise SlipstreamError(f"{file} is empty; give a file with text")
    is_table = file.suffix in _TABLES
    section = DataSection(dataset=str(file), text_column=column) if is_table else DataSection(files=[file])
    return tokenise(tokenizer, read_documents(section, progress.warn), progress)
