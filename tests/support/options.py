"""Arguments of a Pipeline from options by their names alone, so that a test's cases can be flat dictionaries."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from slipstream.options import Layers, Memory, Parallelism, Precision, Runtime

RECORDS = (Memory, Parallelism, Precision, Runtime, Layers)


def grouped(**flat: Any) -> dict[str, Any]:
    """Puts each option of a record into that record, and leaves the other arguments."""
    arguments: dict[str, Any] = {}
    groups: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for name, value in flat.items():
        record = next((record for record in RECORDS if name in record.model_fields), None)
        if record is None:
            arguments[name] = value
        else:
            groups[record][name] = value
    return arguments | {record.section: record(**options) for record, options in groups.items()}
