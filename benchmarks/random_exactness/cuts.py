"""Draws where a case runs and how its work is cut: ranks, order, stages, slices, microbatches, memory."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from slipstream import SCHEDULES, Layers, Memory, Parallelism, Precision, Runtime

Dice = random.Random
_RECORDS = {"memory": Memory, "parallel": Parallelism, "precision": Precision, "runtime": Runtime, "layers": Layers}
_MESHES = [(2, 1, 1)] * 5 + [(1, 2, 1), (1, 1, 2)] * 2 + [(3, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]

PREFIX = "mesh-"  # of the seeds of cases on meshes whose ranks share slices or have different experts
_AXES = ("pp", "dp", "cp", "tp", "ep")
_SHARING = [  # of each at most eight processes
    *[(1, 1, 2, 1, 1), (1, 1, 4, 1, 1), (2, 1, 2, 1, 1), (1, 2, 2, 1, 1), (1, 1, 2, 2, 1), (2, 1, 4, 1, 1)],
    *[(3, 1, 2, 1, 1), (4, 1, 2, 1, 1), (2, 2, 2, 1, 1), (2, 1, 2, 2, 1), (1, 2, 2, 2, 1)],
    *[(1, 2, 1, 1, 2), (1, 4, 1, 1, 2), (1, 4, 1, 1, 4), (2, 2, 1, 1, 2), (1, 2, 1, 2, 2), (2, 4, 1, 1, 4)],
    *[(2, 4, 1, 1, 2), (3, 2, 1, 1, 2), (2, 2, 1, 2, 2)],
    *[(1, 1, 2, 1, 2), (1, 1, 4, 1, 4), (2, 1, 2, 1, 2), (1, 2, 2, 1, 2), (1, 2, 2, 1, 4), (1, 1, 2, 2, 2)],
    *[(2, 2, 2, 1, 2), (2, 2, 2, 1, 4), (2, 1, 2, 2, 2), (1, 2, 2, 2, 4)],
]


class Family(Enum):
    """What a user starts from."""

    CAUSAL = "causal LM"
    SEQUENCE = "nn.Sequential"
    TRAINER = "SlipstreamTrainer"
    PREFERENCES = "preferences"


@dataclass(frozen=True)
class Place:
    """Where a case runs: so many ranks in one process, or a process each."""

    family: Family
    pp: int
    dp: int = 1
    tp: int = 1
    has_processes: bool = False
    cp: int = 1
    ep: int = 1

    @property
    def num_processes(self) -> int:
        return self.pp * self.dp * self.cp * self.tp if self.has_processes else 1

    @property
    def shares(self) -> bool:
        """Whether ranks share slices, or have other experts."""
        return self.cp * self.ep > 1

    @property
    def num_copies(self) -> int:
        """The ranks that hold the same weights and see other tokens."""
        return self.dp * self.cp

    @property
    def sizes(self) -> dict[str, int]:
        """What `make_mesh` is given."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp, "cp": self.cp, "ep": self.ep}

    @property
    def mesh(self) -> str:
        """The axes of more than one rank."""
        return " ".join(f"{name}{size}" for name, size in self.sizes.items() if size > 1)


def place_of(seed: str) -> Place:
    """Returns the place of a case, which is known before its processes start."""
    dice = Dice(f"{seed} place")
    if seed.startswith(PREFIX):
        sizes = dict(zip(_AXES, dice.choice(_SHARING), strict=True))
        return Place(Family.CAUSAL, **sizes, has_processes=True)
    family = dice.choices([Family.CAUSAL, Family.SEQUENCE, Family.TRAINER], [72, 22, 6])[0]
    # By dice of its own, so that other cases draw what they drew before there were any of preferences.
    if happens(Dice(f"{seed} is of preferences"), 0.08):
        family = Family.PREFERENCES
    if family in (Family.TRAINER, Family.PREFERENCES) or dice.random() < 0.7:
        return Place(family, dice.choices([1, 2, 3, 4], [3, 5, 2, 2])[0])
    pp, dp, tp = dice.choice(_MESHES)
    if family is Family.SEQUENCE and tp > 1:
        pp, dp, tp = 2, 1, 1
    return Place(family, pp, dp, tp, has_processes=True)


def happens(dice: Dice, chance: float) -> bool:
    return dice.random() < chance


def parts(dice: Dice, whole: int, number: int) -> list[int]:
    """Returns numbers above 0 that add up to `whole`; fewer where that is less."""
    cuts = dice.sample(range(1, whole), min(number, whole) - 1) if whole > 1 else []
    return [b - a for a, b in pairwise([0, *sorted(cuts), whole])]


def order(dice: Dice, place: Place) -> dict[str, Any]:
    """Returns a schedule by name, and its stages per rank."""
    name = dice.choice([*SCHEDULES])
    fitting = [v for v in (1, 2, 3) if v in SCHEDULES[name].stages_per_rank]
    v = dice.choice(fitting) if happens(dice, 0.98) else 2
    return {"schedule": name, **({"stages_per_rank": v} if v > 1 else {})}


def partition(dice: Dice, num_layers: int, num_stages: int, is_causal: bool) -> list[float] | None:
    """Returns layers per stage, halves and empty ends among them; None where it is left to the Pipeline."""
    if happens(dice, 0.3) or num_stages == 1:
        return None
    halves = is_causal and happens(dice, 0.4)
    empty = [0, num_stages - 1] if is_causal and num_stages > 2 and happens(dice, 0.2) else []
    if empty and happens(dice, 0.6):
        empty = [dice.choice(empty)]
    units, filled = num_layers * (1 + halves), num_stages - len(empty)
    if units < filled:
        return None
    drawn = iter(parts(dice, units, filled))
    found: list[float] = [0 if stage in empty else next(drawn) / (1 + halves) for stage in range(num_stages)]
    return [int(each) if each == int(each) else each for each in found]


def rows_and_tokens(dice: Dice, rows: int, length: int, is_cut: bool = True) -> dict[str, Any]:
    """Returns how a rectangular batch is cut into microbatches and slices."""
    if is_cut and happens(dice, 0.1):
        groups = parts(dice, rows, dice.randint(1, 3))
        return {"microbatches": [[group, parts(dice, length, dice.randint(1, 5))] for group in groups]}
    found: dict[str, Any] = {"num_microbatches": dice.randint(1, min(rows, 4))}
    kind = dice.choices(["whole", "count", "list", "default"], [2, 5, 4, 1])[0] if is_cut else "default"
    if kind == "whole":
        found["slices"] = 1
    if kind == "count":
        found["slices"] = dice.randint(2, 7)
    if kind == "list":
        found["slices"] = parts(dice, length, dice.randint(2, 6))
    return found


ON_HOST = False
"""Whether all cases with attention to earlier slices have keys and values on the host, or a share of them."""


def memory(dice: Dice, is_causal: bool) -> dict[str, Any]:
    """Returns what is recomputed and offloaded, and a limit that is never reached."""
    kinds = ["none", "selective", "full", "stage", "stage+full", dice.randint(1, 3)] + (
        [] if is_causal else ["segments"]
    )
    found: dict[str, Any] = {"recompute": dice.choice(kinds)} if happens(dice, 0.5) else {}
    if happens(dice, 0.12):
        found["offload"] = dice.choice([0.3, 0.5, 1.0])
    if is_causal and happens(dice, 0.03):
        found["limit"] = 2e9
    if happens(dice, 0.05):
        found["num_flushes"] = 2
    return found


def context(seed: str) -> dict[str, Any]:
    """Returns where keys and values lie, by dice of its own: a case is the same wherever they do."""
    dice = Dice(f"{seed} context")
    return {"context": dice.choice(["host", "host", round(dice.random(), 2)])} if ON_HOST else {}


def grouped(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a Pipeline's arguments, in which options on one topic are a record."""
    return {name: _RECORDS[name](**value) if name in _RECORDS else value for name, value in settings.items()}
