"""A plan: every decision about how a step is trained, each of which may still be open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.options import SHARED_WORK, Degrees
from slipstream.planner.plan_fields import AUTO, PLAN_FIELDS, PlanField
from slipstream.schedule import AUTOMATIC, SCHEDULES, Schedule, make_schedule
from slipstream.units import numbers_text, plural


class _Open:
    """What isn't decided yet."""

    def __repr__(self) -> str:
        return "OPEN"

    def __reduce__(self) -> str:
        return "OPEN"  # one object, also after copying and pickling


OPEN: Any = _Open()
"""The value of a plan's field that isn't decided yet."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """One way to train. A field that isn't decided yet is `OPEN`.

    `tensor_parallel` · `context_parallel` · `pipeline_parallel` · `data_parallel` is the number of devices, and
    `expert_parallel` divides the ranks with the same weights. Every pipeline takes `num_microbatches` of
    `microbatch_size` sequences per step.

    The fields up to `vocabulary` are the choices that a search combines. The others follow from them, or are found
    together with an order.

    Args:
        tensor_parallel: ranks that share every layer.
        pipeline_parallel: ranks of a pipeline.
        data_parallel: pipelines that share the batch.
        stages_per_rank: stages of the rank with the most.
        schedule: a name of `slipstream.SCHEDULES`, or the compute actions of an order that was found.
        microbatch_size: sequences of a microbatch.
        num_slices: slices of a sequence.
        recompute: "none", "selective", "full", "stage" or "stage+full". Trainings also have "segments", and the
            number of a stage's layers, such as "3", of which no costs are known.
        offload: the share of slices whose activations are offloaded to host memory, 0 to 1.
        context: where keys and values lie: on the "device" or the "host", or the share that is on the host.
        optimizer: where the optimizer runs, with its state: on the "device" or the "host".
        shard: what is sharded over the ranks with the same weights: "none", the "optimizer"'s state, or the
            "parameters" too.
        slicing: how slices are found: "equal-time", or "exact", TeraPipe's optimum for equal stages; "auto": together
            with the order.
        context_parallel: ranks that share every slice.
        expert_parallel: ranks over which experts are spread.
        context_exchange: the exchange around attention of ranks that share slices: "heads" for tokens, or "keys".
        loss_tokens: the tokens of a slice whose logits exist at a time, 0 for all.
        vocabulary: where the head's rows are: "whole", on the last stage's rank, or "spread" over the ranks of the
            pipeline.
        num_microbatches: microbatches of a pipeline's step.
        placement: the rank of each stage.
        partition: layers of each stage, perhaps with halves; 0 for an end of the model alone.
        slices: tokens of each slice.
    """

    tensor_parallel: int = OPEN
    pipeline_parallel: int = OPEN
    data_parallel: int = OPEN
    stages_per_rank: int = OPEN
    schedule: str | Schedule = OPEN
    microbatch_size: int = OPEN
    num_slices: int = OPEN
    recompute: str = OPEN
    offload: float = OPEN
    context: str | float = OPEN
    optimizer: str = OPEN
    shard: str = OPEN
    slicing: str = OPEN
    context_parallel: int = OPEN
    expert_parallel: int = OPEN
    context_exchange: str = OPEN
    loss_tokens: int = OPEN
    vocabulary: str = OPEN
    num_microbatches: int = OPEN
    placement: tuple[int, ...] = OPEN
    partition: tuple[float, ...] = OPEN
    slices: tuple[int, ...] = OPEN

    def __hash__(self) -> int:
        # A search looks plans up hundreds of thousands of times. An order is left out: its slices and cut are hashed.
        return hash(_hashed(self))

    # --- what is decided ---------------------------------------------------------------------------------------------

    @property
    def open_fields(self) -> tuple[str, ...]:
        """The names of the fields that aren't decided, without those that another one implies."""
        return tuple(
            name
            for name in FIELDS
            if getattr(self, name) is OPEN and getattr(self, _IMPLIED_BY.get(name, name)) is OPEN
        )

    def is_open(self, name: str) -> bool:
        """Returns whether a field isn't decided."""
        return getattr(self, name) is OPEN

    def only(self, names: Sequence[str]) -> Plan:
        """Returns the plan with all fields open but these."""
        return Plan(**{name: getattr(self, name) for name in names})

    def closed(self, **choices: Any) -> Plan:
        """Returns the plan with these choices, and with what follows from them where it was open or is given anew.

        An order says its placement, its ranks, its microbatches and whether it spreads the vocabulary; a named schedule
        its placement; slices say their number.
        """
        values = {name: getattr(self, name) for name in FIELDS} | choices
        implied: dict[str, Any] = {}
        schedule = values["schedule"]
        if isinstance(schedule, Schedule):
            implied = {
                "placement": schedule.placement,
                "pipeline_parallel": schedule.num_ranks,
                "num_microbatches": schedule.num_microbatches,
                "num_slices": schedule.num_slices,
                "vocabulary": "spread" if schedule.spreads_vocabulary else "whole",
            }
        elif OPEN not in (shape := (schedule, values["pipeline_parallel"], values["stages_per_rank"])):
            implied = {"placement": placement_of(*shape)}
        if (placement := choices.get("placement", implied.get("placement", values["placement"]))) is not OPEN:
            implied["stages_per_rank"] = max(map(placement.count, set(placement)))
        if values["slices"] is not OPEN:
            implied["num_slices"] = len(values["slices"])
        return Plan(**values | implied | choices)

    def differences(self, other: Plan) -> list[str]:
        """Returns the names of the fields in which the two differ."""
        return [name for name in FIELDS if getattr(self, name) != getattr(other, name)]

    def choice(self, name: str) -> Any:
        """Returns the value of a choice as options name it: an order that was found is "auto"."""
        return self.schedule_name if name == "schedule" else getattr(self, name)

    @property
    def schedule_name(self) -> str:
        """The name of the schedule, "auto" for an order that was found."""
        return AUTO if isinstance(self.schedule, Schedule) else self.schedule

    # --- what follows ------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Plan:
        """The degrees and the sequences of a microbatch alone."""
        return self.only(MESH)

    @property
    def degrees(self) -> Degrees:
        """By how many ranks a stage's work is shared."""
        return Degrees(self.tensor_parallel, self.context_parallel, self.expert_parallel, self.context_exchange)

    @property
    def num_copies(self) -> int:
        """The number of ranks that have the same weights, but for experts, and see other tokens."""
        return self.data_parallel * self.context_parallel

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.num_copies

    # --- for people --------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Returns the choices on one line, without what is open, and without ways to save memory that aren't used."""
        return ", ".join(filter(None, (field.phrase(self) for field in PLAN_FIELDS.values())))

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        values = {name: repr(getattr(self, name)) for name in FIELDS if getattr(self, name) is not OPEN}
        if isinstance(self.schedule, Schedule):
            values["schedule"] = f"<{self.schedule.name}>"  # its actions may be thousands
        return f"Plan({', '.join(f'{name}={value}' for name, value in values.items())})"

    # --- checks ------------------------------------------------------------------------------------------------------

    def check_closed(self, purpose: str) -> None:
        """Raises SlipstreamError where something is open. It begins with the `purpose` and names the open fields."""
        if names := self.open_fields:
            raise SlipstreamError(
                f"{purpose}: the plan leaves {' and '.join(names)} open ({self.describe() or 'nothing is decided'}). "
                f"Decide them by plan.closed({', '.join(f'{name}=...' for name in names)})."
            )

    def check(self) -> None:
        """Raises SlipstreamError where a field has a value that isn't allowed, or two of them contradict each other."""
        for name, field in PLAN_FIELDS.items():
            value = self.choice(name)
            if value is not OPEN and not field.is_unplanned(value):
                field.check(value)
        if self.slices is not OPEN and min(self.slices, default=0) < 1:
            raise SlipstreamError(f"slices={[*self.slices]}: give the tokens of each slice, at least 1.")
        self._check_agreement()

    def _check_agreement(self) -> None:
        """Raises SlipstreamError where two decided fields contradict each other."""
        if (self.optimizer, self.shard) == ("host", "parameters"):
            raise SlipstreamError(
                "optimizer='host' with shard='parameters', which no training can. Give shard='optimizer', or "
                "optimizer='device'."
            )
        implied = self.closed()
        for name in ("placement", "pipeline_parallel", "num_microbatches", "num_slices", "vocabulary"):
            mine, other = getattr(self, name), getattr(implied, name)
            if mine is not OPEN and mine != other:
                source = "slices" if name == "num_slices" and self.slices is not OPEN else "schedule"
                raise SlipstreamError(f"{name}={_plain(mine)}, but {source} has {_plain(other)}. Make them equal.")
        num_slices = self.schedule.num_slices if isinstance(self.schedule, Schedule) else self.num_slices
        if OPEN not in (self.slices, num_slices) and len(self.slices) != num_slices:
            raise SlipstreamError(
                f"slices={[*self.slices]} are {len(self.slices)}, but schedule has {num_slices}. Make them equal."
            )
        if OPEN not in (self.partition, placement := implied.placement) and len(self.partition) != len(placement):
            raise SlipstreamError(
                f"partition={[*self.partition]} has {plural(len(self.partition), 'stage')}, but placement="
                f"{[*placement]} has {len(placement)}. Make them equal."
            )

    # --- the settings of a training ----------------------------------------------------------------------------------

    def dump(self, order: str | None = None) -> dict[str, dict[str, Any]]:
        """Returns the settings as a configuration's file has them.

        Where the mesh is decided, which `parallel.tensor` tells, they are without what `load` takes for granted.

        Args:
            order: the name of the file with an order that was found. None: the order's text stands in its place.
        """
        sections = self.settings()
        if isinstance(self.schedule, Schedule):
            sections["pipeline"]["schedule"] = order or str(self.schedule)
        for name, field in PLAN_FIELDS.items() if self.tensor_parallel is not OPEN else ():
            if field.absent is not None and getattr(self, name) == field.absent:
                section, setting = field.place
                del sections[section][setting]
        return sections

    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns the plan as the sections `pipeline`, `memory` and `parallel` of a training configuration, without
        what is open."""
        sections = {section: dict.fromkeys(first, OPEN) for section, first in _FIRST_SETTINGS.items()}
        for name, field in PLAN_FIELDS.items():
            if field.setting and not self.is_open(name):
                section, setting = field.place
                sections[section][setting] = field.written(getattr(self, name))
        sections["pipeline"] |= {
            "schedule": self.schedule,
            "slices": self.num_slices if self.slices is OPEN else [int(length) for length in self.slices],
            "partition": OPEN if self.partition is OPEN else [*map(_whole, self.partition)],
        }
        # An order says its own stages.
        if isinstance(self.schedule, Schedule):
            sections["pipeline"]["stages_per_rank"] = OPEN
        # Without ranks that share slices nothing is exchanged.
        if self.context_parallel in (OPEN, 1):
            sections["parallel"]["context_exchange"] = OPEN
        return {
            name: {setting: value for setting, value in section.items() if value is not OPEN}
            for name, section in sections.items()
        }

    @classmethod
    def load(cls, settings: Mapping[str, Any], order: Schedule | None = None) -> Plan:
        """Returns the plan in the settings of a training configuration. What they leave out, or leave to "auto", is
        open.

        Settings that decide the mesh, as `dump` writes them, may lack those that have come since: what such a setting
        was before is known, and isn't open. They decide it where they have `parallel.tensor`.

        Args:
            settings: the configuration's sections as nested dictionaries, as `dump` returns them, or a whole file's.
            order: the order in the file that `pipeline.schedule` names.

        Raises:
            SlipstreamError: for values that aren't allowed or contradict each other, and for an order's file without
                `order`.
        """
        pipeline, parallel, training = (settings.get(name) or {} for name in ("pipeline", "parallel", "training"))
        decides_mesh = _given(parallel, "tensor") is not OPEN
        slices = _given(pipeline, "slices")
        values = {
            **{name: _read(field, settings, decides_mesh) for name, field in PLAN_FIELDS.items() if field.setting},
            "schedule": _schedule_of(_given(pipeline, "schedule"), order),
            "num_slices": slices if isinstance(slices, int) else OPEN,
            "slices": tuple(slices) if isinstance(slices, Sequence) else OPEN,
            "partition": OPEN if (cut := _given(pipeline, "partition")) is OPEN else tuple(map(_whole, cut)),
        }
        # Without ranks that share slices the exchange doesn't matter.
        if decides_mesh and values["context_parallel"] == 1:
            values["context_exchange"] = ONE_DEVICE.context_exchange
        if isinstance(values["schedule"], Schedule):
            values["stages_per_rank"] = OPEN
        microbatches, rows = values["num_microbatches"], training.get("batch_size")
        if rows is not None and OPEN not in (microbatches, replicas := values["data_parallel"]):
            values["microbatch_size"] = -(-rows // (replicas * microbatches))
        plan = cls(**values)
        plan.check()
        return plan.closed()


FIELDS = tuple(field.name for field in fields(Plan))
"""The names of everything that a plan decides."""
CHOICES = FIELDS[: FIELDS.index("vocabulary") + 1]
"""The names of what a search combines; the other fields follow."""
MESH = (
    *(way.choice for way in SHARED_WORK),
    "context_exchange",
    "pipeline_parallel",
    "data_parallel",
    "microbatch_size",
)
"""The names of what a mesh decides."""
NOTHING_DECIDED = Plan()
"""The plan of which all is open."""
PLAIN = Plan(**{name: field.plain for name, field in PLAN_FIELDS.items() if field.plain is not None})
"""The plan that saves no memory, and whose ranks share neither slices nor experts; all else is open."""
ONE_DEVICE = replace(
    PLAIN,
    tensor_parallel=1,
    pipeline_parallel=1,
    data_parallel=1,
    stages_per_rank=1,
    schedule="1f1b",
    microbatch_size=1,
    num_slices=1,
    slicing="equal-time",
    context_exchange="heads",
)
"""The choices of a device by itself, which saves no memory: others begin with these."""
# The settings of a section that come before others
_FIRST_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "pipeline": ("num_ranks", "stages_per_rank", "schedule", "num_microbatches", "slices", "partition"),
    "memory": (),
    "parallel": ("data", *(way.degree for way in SHARED_WORK)),
}
_IMPLIED_BY = {"num_slices": "slices", "slicing": "slices", "stages_per_rank": "placement"}


# The fields by which plans are looked up, and found orders by their name.
_hashed = attrgetter(*({"schedule": "schedule_name"}.get(name, name) for name in CHOICES), "partition", "slices")


@lru_cache(maxsize=4096)
def placement_of(schedule: str, pipeline: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns the rank of each stage in a named schedule."""
    return make_schedule(schedule, pipeline, 1, 1, stages_per_rank).placement


def _given(section: Mapping[str, Any], setting: str) -> Any:
    """Returns a setting; OPEN where it is left out or to "auto"."""
    value = section.get(setting)
    return OPEN if value is None or (isinstance(value, str) and value in AUTOMATIC) else value


def _read(field: PlanField, settings: Mapping[str, Any], decides_mesh: bool) -> Any:
    """Returns the value that settings have of a field, or take for granted; OPEN where they leave it to others."""
    section, setting = field.place
    given = settings.get(section) or {}
    if decides_mesh and field.absent is not None and given.get(setting) is None:
        return field.absent
    value = _given(given, setting)
    return OPEN if value is OPEN else field.read(value)


def _schedule_of(value: Any, order: Schedule | None) -> Any:
    """Returns a named schedule, or the order that a text or a file has."""
    if not isinstance(value, str) or value in SCHEDULES:
        return value
    if "\n" in value:
        return Schedule.parse(value)
    if order is None:
        raise SlipstreamError(
            f"pipeline.schedule={value}: the order in that file isn't given. Pass it as order=Schedule.parse(text), or "
            f"choose one of {', '.join(SCHEDULES)}."
        )
    return order


def _whole(layers: float) -> float:
    """Returns a number of layers as it is written, a whole one without a fraction."""
    return int(layers) if layers == int(layers) else float(layers)


def _plain(value: Any) -> str:
    return numbers_text(value, " ") if isinstance(value, tuple) else str(value)
