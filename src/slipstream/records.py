"""The base of all options: frozen records that check themselves, with the same words in Python and in YAML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.errors import SlipstreamError, did_you_mean

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _RecordType(ModelMetaclass):
    """Turns pydantic's errors into ours where a record is constructed by itself, not as a part of another."""

    def __call__(cls, *args: Any, **values: Any) -> Any:  # noqa: N805
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise SlipstreamError("\n".join(describe_problems(error, cls))) from None


class Record(BaseModel, metaclass=_RecordType):
    """Options on one topic. An unknown name, or a value that isn't allowed, raises SlipstreamError."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    section: ClassVar[str] = ""  # its name as an argument and as a section of a configuration

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Raises SlipstreamError where one of these options isn't as it is by default."""
        for name in names:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise SlipstreamError(f"{self.section}.{name}={value!r}: {reason} Leave it out.")


def describe_problems(error: ValidationError, record: Any) -> list[str]:
    """One line for each option that is wrong: its name, its value, and what is allowed."""
    lines: dict[str, str] = {}
    for problem in error.errors():
        path = [*([record.section] if record.section else []), *map(str, problem["loc"])]
        name = ".".join(path[:2])  # what follows says which type of several was tried
        if problem["type"] == "extra_forbidden":
            lines[name] = _describe_unknown(path, record)
        elif problem["type"] == "missing":
            lines[name] = f"{name} is missing; add it to the configuration or give --{name}=..."
        elif problem["type"] == "value_error":
            reason = str(problem["ctx"]["error"])  # of a whole section it names the options by itself
            lines[name or reason] = f"{name}={problem['input']!r}: {reason}" if len(path) > 1 else reason
        elif name in lines:
            lines[name] += f", or {problem['msg'].lower()}"
        else:
            lines[name] = f"{name}={problem['input']!r} isn't allowed: {problem['msg'].lower()}"
    return list(lines.values())


def _describe_unknown(path: list[str], record: Any) -> str:
    *sections, key = path
    if sections and sections[0] in ("pipeline", "parallel") and key in MOVED:
        return f"{'.'.join(path)} is now {MOVED[key]}"
    if not record.section:
        for section in sections:
            record = record.model_fields[section].annotation
    where = ".".join(sections)
    hint = did_you_mean(key, record.model_fields, where and f"{where}.")
    if hint == ".":
        hint = f"; {where or 'the configuration'} has: {', '.join(sorted(record.model_fields))}"
    return f"unknown key {'.'.join(path)}{hint}"


# What arguments of the Pipeline, and keys of a configuration's `pipeline` and `parallel`, are called now
MOVED = {
    "recompute": "memory.recompute",
    "offload": "memory.offload",
    "memory_limit": "memory.limit",
    "num_flushes": "memory.num_flushes",
    "sequence": "parallel.sequence_parallel",
    "sequence_parallel": "parallel.sequence_parallel",
    "tensor_plan": "parallel.tensor_plan",
    "shard_optimizer": "parallel.shard_optimizer",
    "shard_parameters": "parallel.shard_parameters",
    "dtype": "precision.dtype",
    "master_dtype": "precision.master_dtype",
    "fused": "runtime.fused",
    "self_check": "runtime.self_check",
    "timeout": "runtime.timeout",
    "costs": "layers.costs",
    "example": "layers.example",
    "batch_norm_over_replicas": "layers.batch_norm_over_replicas",
}
