"""What a change of a model is, the uses of a Pipeline that each is tried in, and small parts of changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from support.architectures import ARCHITECTURES, build

EXACT, REFUSED, EITHER = "exact", "refused", "exact or refused"
SLICES = [31, 20, 13]

# A use is what a Pipeline is given. Numbers of layers stand for those of a model of four layers.
USES: dict[str, dict[str, Any]] = {
    "whole": {"slices": 1},
    "sliced": {"slices": SLICES},
    "stages": {"slices": SLICES, "num_ranks": 2, "partition": [2, 2]},
    "microbatches": {"slices": 1, "num_microbatches": 2, "num_ranks": 2, "partition": [2, 2]},
    "processes": {"slices": SLICES, "partition": [2, 2]},
    "halves": {"slices": SLICES, "num_ranks": 2, "partition": [1.5, 2.5]},
    "spread": {"slices": SLICES, "num_ranks": 2, "partition": [2, 2], "vocabulary": "spread"},
    "fused": {"slices": SLICES, "fused": True},
    "recompute": {"slices": SLICES, "recompute": "full"},
}
IN_SLICES = [use for use in USES if use not in ("whole", "microbatches")]
IN_PIECES = [use for use in USES if use != "whole"]
IN_STAGES = ["stages", "microbatches", "processes", "halves", "spread"]


@dataclass(frozen=True, eq=False)
class Change:
    """A change, and of uses (and of `save_pretrained`) the outcomes that aren't exact.

    A refusal has one of `names` at least. `during` is entered for as long as the model is built and runs.
    """

    name: str
    does: str
    make: Callable[[PreTrainedModel], nn.Module | None]
    config: PretrainedConfig
    group: str
    outcomes: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    during: Callable[[], AbstractContextManager[object]] = nullcontext
    num_layers: int = 4

    def outcome(self, use: str) -> str:
        return self.outcomes.get(use, EXACT)

    def built(self) -> nn.Module:
        """The changed model in float64, each time with the same numbers."""
        model = build(self.config)
        changed = self.make(model)
        return (model if changed is None else changed).train()

    def settings(self, use: str) -> dict[str, Any]:
        """The arguments of a Pipeline for the use, with stages that fit the number of layers."""
        settings = dict(USES[use])
        if "partition" in settings:
            first = settings["partition"][0]
            settings["partition"] = [first, self.num_layers - first]
        return settings


ALL: list[Change] = []
GROUPS = {  # by the module that has them
    "hooks": "Hooks that work token by token",
    "forwards": "Forwards of your own",
    "weights": "Weights that are shared, or are not",
    "layers": "Layers that are deleted, added or repeated",
    "modules": "Parametrizations, quantised layers, adapters, settings",
    "mixing": "Code that looks across tokens, calls or layers",
}


def change(
    name: str,
    does: str,
    *,
    of: str = "llama",
    names: str = "",
    num_layers: int = 4,
    during: Callable[[], AbstractContextManager[object]] = nullcontext,
    **outcomes: str,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers a function that changes a model. `names` are words apart by |; without, those of a layer or a hook."""

    def add(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        words = tuple(names.split("|")) if names else ("layers.", "hook", "forward")
        group = GROUPS[make.__module__.rpartition(".")[-1]]
        ALL.append(Change(name, does, make, ARCHITECTURES[of], group, outcomes, words, during, num_layers))
        return make

    return add


def everywhere_in(uses: list[str], outcome: str = REFUSED) -> dict[str, str]:
    return dict.fromkeys(uses, outcome)


def noise(*shape: int, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def scaled(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 1.1


def scaled_first_argument(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return (args[0] * 1.1, *args[1:])


def scaled_gradients(module: nn.Module, grad_input: tuple[Tensor | None, ...], grad_output: object) -> tuple[Any, ...]:
    return tuple(None if each is None else 0.9 * each for each in grad_input)
