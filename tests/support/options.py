"""Arguments of a Pipeline from a flat dictionary, so that a test's cases can be merged."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from slipstream.options import Layers, Memory, Parallelism, Precision, Runtime

RECORDS: dict[str, Any] = {record.section: record for record in (Memory, Parallelism, Precision, Runtime, Layers)}


FLAT = {name: (section, name) for section, record in RECORDS.items() for name in record.model_fields}
FLAT["memory_limit"] = "memory", "limit"


def grouped(**flat: Any) -> dict[str, Any]:
    """Puts each option that lies in a record into that record, and leaves the other arguments."""
    arguments: dict[str, Any] = {}
    groups: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in flat.items():
        section, option = FLAT.get(name, ("", name))
        (groups[section] if section else arguments)[option] = value
    return arguments | {section: RECORDS[section](**options) for section, options in groups.items()}
