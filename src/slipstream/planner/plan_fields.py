"""The fields of a plan one by one: the values that each may have, the setting that says it, and how people read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.options import SHARED_WORK
from slipstream.schedule import SCHEDULES, schedule_hint
from slipstream.units import plural

AUTO = "auto"  # the schedule and slicing of the joint search's plans


class Decisions(Protocol):
    """The values of all fields: what a field's description reads of a `Plan`."""

    def is_open(self, name: str) -> bool:
        """Returns whether a field isn't decided."""

    def choice(self, name: str) -> Any:
        """Returns the value of a field as options name it."""


class NumberRule(NamedTuple):
    """The numbers that a field may have, and what is said of others."""

    allows: Callable[[Any], bool]
    advice: str

    def check(self, name: str, value: Any) -> None:
        """Raises SlipstreamError for another value of what is called `name`."""
        if not self.allows(value):
            raise SlipstreamError(f"{name}={value!r}: {self.advice}.")


COUNTS = NumberRule(
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
    "give a whole number of 1 or more",
)
_SHARES = NumberRule(
    lambda value: isinstance(value, (int, float)) and 0 <= value <= 1,
    "give the share of slices that is offloaded, 0 to 1",
)
_TILES = NumberRule(
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "give the tokens of a slice whose logits exist at a time, or 0 for all",
)
_SHARES_ON_HOST = NumberRule(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1,
    "give the share of keys and values on the host, 0 to 1",
)


def _itself(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class PlanField:
    """The description of one field of a plan.

    Args:
        name: of the field.
        names: that it may have. Empty: it has numbers.
        numbers: that it may have instead, or besides.
        hint: returns the end of a sentence that says that a name is unknown, given that and the known ones.
        is_unplanned: returns whether a training may have a value that no search chooses, as its costs aren't known.
        setting: of a training configuration that says it, with its section. Empty: none does by itself.
        absent: what it is where a file that decides the mesh lacks the setting. None: it is open.
        written: returns a value as the setting has it.
        read: returns the value that a setting has.
        plain: the value of a device by itself, which saves no memory: it isn't worth saying. None: all are said.
        said: its words in the line about a plan, with `{}` for the value, or a function of the plan. Empty: none.
        called: its name before a value, in sentences. Empty: the field's.
        text: returns a value as people read it.
        title: the heading of its column in a table of plans. Empty: it has none.
        meaning: of the column, in the legend. Empty: the title says it.
        cell: returns what the column has, where that is more than the value.
    """

    name: str
    names: tuple[str, ...] = ()
    numbers: NumberRule | None = None
    hint: Callable[[str, Sequence[str]], str] = did_you_mean
    is_unplanned: Callable[[Any], bool] = lambda value: False
    setting: str = ""
    absent: Any = None
    written: Callable[[Any], Any] = _itself
    read: Callable[[Any], Any] = _itself
    plain: Any = None
    said: str | Callable[[Decisions], str] = ""
    called: str = ""
    text: Callable[[Any], str] = str
    title: str = ""
    meaning: str = ""
    cell: Callable[[Decisions], str] | None = None

    def check(self, value: Any, suggests: bool = False) -> None:
        """Raises SlipstreamError for a value that no search can choose; with `suggests` it names the one that was
        meant."""
        if not self.names or (self.numbers is not None and not isinstance(value, str)):
            (self.numbers or COUNTS).check(self.name, value)
        elif value not in self.names:
            hint = self.hint(str(value), self.names) if suggests else "."
            besides = "" if self.numbers is None else f", or {self.numbers.advice}"
            raise SlipstreamError(
                f"{self.name}={value!r} isn't known{hint} Choose one of {', '.join(self.names)}{besides}."
            )

    @property
    def place(self) -> tuple[str, str]:
        """The section of the setting, and its name there."""
        section, _, name = self.setting.partition(".")
        return section, name

    def phrase(self, plan: Decisions) -> str:
        """Returns its words in the line about a plan; "" for what is open or plain."""
        if not isinstance(self.said, str):
            return self.said(plan)
        value = plan.choice(self.name)
        return "" if plan.is_open(self.name) or value == self.plain else self.said.format(value)

    def named_value(self, plan: Decisions) -> str:
        """Returns its name and its value in a plan."""
        return f"{self.called or self.name.replace('_', ' ')} {self.value(plan)}"

    def value(self, plan: Decisions) -> str:
        """Returns its value in a plan."""
        return self.text(plan.choice(self.name))

    def in_column(self, plan: Decisions) -> str:
        """Returns what its column has for a plan."""
        return self.value(plan) if self.cell is None else self.cell(plan)


def _decided(plan: Decisions, name: str, text: str) -> str:
    """Returns words about a field, with `{}` for its value; "" where it is open."""
    return "" if plan.is_open(name) else text.format(plan.choice(name))


def _counted(plan: Decisions, name: str, noun: str) -> str:
    """Returns the number that a field has, with its noun; "" where it is open."""
    return "" if plan.is_open(name) else plural(plan.choice(name), noun)


# The degrees whose product is the number of devices
_PRODUCT = ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel")


def _said_degrees(plan: Decisions) -> str:
    """Returns the degrees, the ranks over which experts are spread after the product of the others."""
    factors = [_decided(plan, name, f"{name.removesuffix('_parallel')} {{}}") for name in _PRODUCT]
    if plan.choice("context_parallel") != 1 and factors[1]:
        factors[1] += _decided(plan, "context_exchange", " by {}")
    experts = _decided(plan, "expert_parallel", "expert {}")
    return ", ".join(filter(None, [" x ".join(filter(None, factors)), experts]))


def _said_order(plan: Decisions) -> str:
    stages = _counted(plan, "stages_per_rank", "stage")
    parts = [_decided(plan, "schedule", "schedule {}"), f"{stages} per rank" if stages else ""]
    return ", ".join(filter(None, parts))


def _said_slices(plan: Decisions) -> str:
    return _counted(plan, "num_slices", "exact slice" if plan.choice("slicing") == "exact" else "slice")


def _said_sequences(plan: Decisions) -> str:
    sequences = _counted(plan, "microbatch_size", "sequence")
    return f"{sequences} per microbatch" if sequences else ""


def _said_context(plan: Decisions) -> str:
    place = plan.choice("context")
    return "" if plan.is_open("context") or place == "device" else f"context on the {_context_text(place)}"


def _context_text(place: str | float) -> str:
    return place if isinstance(place, str) else f"host ({place:.0%})"


def _said_shards(plan: Decisions) -> str:
    return {"optimizer": "optimizer state sharded", "parameters": "parameters sharded"}.get(plan.choice("shard"), "")


def _degrees(plan: Decisions) -> str:
    """Returns the degrees, in brackets that of experts: they are spread over ranks that the product has counted."""
    return f"{' x '.join(str(plan.choice(name)) for name in _PRODUCT)} ({plan.choice('expert_parallel')})"


def _stages(plan: Decisions) -> str:
    """Returns the number of stages on a rank, or the fewest and the most."""
    placement = plan.choice("placement")
    counts = {placement.count(rank) for rank in placement}
    return " or ".join(str(count) for count in sorted(counts, reverse=True))


def _is_layers(value: object) -> bool:
    """Returns whether a recomputation is a number of layers."""
    return isinstance(value, str) and value.isdigit() and value != "0"


_WAYS = tuple(
    PlanField(
        name=way.choice,
        setting=f"parallel.{way.degree}",
        absent=1,
        plain=1,
    )
    for way in SHARED_WORK
    # The field that says the degrees of all is below.
    if way.axis != "tp"
)

PLAN_FIELDS: Mapping[str, PlanField] = {
    each.name: each
    for each in (
        PlanField(
            name="tensor_parallel",
            setting="parallel.tensor",
            said=_said_degrees,
            title="tp x cp x pp x dp (ep)",
            meaning="devices that share every layer, ranks that share every slice, ranks of a pipeline, pipelines that "
            "share the batch; (ep): ranks over which experts are spread",
            cell=_degrees,
        ),
        *_WAYS,
        PlanField(
            name="context_exchange",
            names=("heads", "keys"),
            # Of "auto" the run decides.
            is_unplanned=lambda value: value == AUTO,
            setting="parallel.context_exchange",
        ),
        PlanField(name="pipeline_parallel", setting="pipeline.num_ranks"),
        PlanField(name="data_parallel", setting="parallel.data"),
        PlanField(
            name="stages_per_rank",
            setting="pipeline.stages_per_rank",
            title="stages per rank",
            meaning="parts of the model on a rank",
            cell=_stages,
        ),
        PlanField(
            name="schedule",
            names=(*SCHEDULES, AUTO),
            hint=schedule_hint,
            said=_said_order,
            title="schedule",
            meaning="the order of forwards and backwards",
        ),
        PlanField(
            name="num_slices",
            said=_said_slices,
            called="slices",
            title="slices",
            meaning="parts of a sequence",
        ),
        PlanField(
            name="slicing",
            names=("equal-time", "exact", AUTO),
            title="slicing",
            meaning="how their lengths were found",
        ),
        PlanField(
            name="num_microbatches",
            setting="pipeline.num_microbatches",
            title="microbatches",
            meaning="of a pipeline's step, each of so many sequences",
            cell=lambda plan: f"{plan.choice('num_microbatches')} of {plan.choice('microbatch_size')}",
        ),
        PlanField(name="microbatch_size", said=_said_sequences),
        PlanField(
            name="recompute",
            names=("none", "selective", "full", "stage", "stage+full"),
            is_unplanned=lambda value: value == "segments" or _is_layers(value),
            setting="memory.recompute",
            written=lambda value: int(value) if _is_layers(value) else value,
            read=str,
            plain="none",
            said="recompute {}",
            title="recompute",
        ),
        PlanField(
            name="offload",
            numbers=_SHARES,
            setting="memory.offload",
            written=float,
            read=float,
            plain=0.0,
            said="{:.0%} offloaded",
            text=lambda share: f"{share:.0%}" if share else "none",
            title="offload",
        ),
        PlanField(
            name="context",
            names=("device", "host"),
            numbers=_SHARES_ON_HOST,
            setting="memory.context",
            absent="device",
            plain="device",
            said=_said_context,
            called="context on the",
            text=_context_text,
            title="context",
            meaning="where keys and values lie",
        ),
        PlanField(
            name="optimizer",
            names=("device", "host"),
            setting="memory.optimizer",
            absent="device",
            plain="device",
            said="optimizer on the {}",
            title="optimizer",
            meaning="where it runs, with its state",
        ),
        PlanField(
            name="loss_tokens",
            numbers=_TILES,
            setting="memory.loss_tokens",
            absent=0,
            written=lambda tokens: tokens or None,
            plain=0,
            said="loss of {} tokens at a time",
            text=lambda tokens: str(tokens or "all"),
        ),
        PlanField(
            name="vocabulary",
            names=("whole", "spread"),
            setting="pipeline.vocabulary",
            plain="whole",
            said="vocabulary {}",
            title="vocabulary",
            meaning="whether the head's rows are spread over the ranks of a pipeline",
        ),
        PlanField(
            name="shard",
            names=("none", "optimizer", "parameters"),
            setting="parallel.shard",
            plain="none",
            said=_said_shards,
            called="sharded",
            title="sharded",
            meaning="what is spread over ranks with the same weights",
        ),
    )
}
"""Every choice of a plan and its number of microbatches, by the field's name, in the order in which people read them.
Its placement, cut and slices are given as lists, and said in lines of their own."""
