"""The models of `auto_grid`, and the settings for each that somebody might make by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from benchmarks.harness import is_trial
from slipstream.planner.cuts import Cuts
from slipstream.planner.slicing.equal_stage_slicing import equal_time_slices

DEFAULT = "1f1b, balanced, 8 slices"
_ATTENTION = 0.3  # of the time, for slices of equal time
_UNIT = 64  # tokens
_TRIAL_TOKENS = 256


@dataclass(frozen=True)
class GridModel:
    """A model and the length of its one sequence.

    Args:
        what: in words.
        make: returns the configuration, given the number of positions.
        tokens: of the sequence, except in a trial.
        num_layers: of the model.
    """

    what: str
    make: Callable[[int], PretrainedConfig]
    tokens: int
    num_layers: int

    @property
    def length(self) -> int:
        return _TRIAL_TOKENS if is_trial() else self.tokens

    def config(self) -> PretrainedConfig:
        return self.make(self.length)


def _llama(hidden: int, layers: int, vocabulary: int) -> Callable[[int], PretrainedConfig]:
    return lambda length: LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        tie_word_embeddings=False,
    )


def _mixture(length: int) -> PretrainedConfig:
    return Qwen3MoeConfig(
        hidden_size=256,
        intermediate_size=704,
        moe_intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        vocab_size=8192,
        max_position_embeddings=length,
        tie_word_embeddings=False,
    )


MODELS = {
    "deep": GridModel("16 layers of 256", _llama(256, 16, 8192), 2048, 16),
    "words": GridModel("6 layers of 256 with 65,536 words", _llama(256, 6, 65536), 1024, 6),
    "long": GridModel("4 layers of 512", _llama(512, 4, 8192), 8192, 4),
    "mixture": GridModel("8 layers of 256, every other one a mixture of 8 experts", _mixture, 2048, 8),
}


def grid(model: GridModel) -> dict[str, Mapping[str, Any]]:
    """Returns the settings by name, the default first."""
    default = {"schedule": "1f1b", "slices": 8}
    return {DEFAULT: default} | {name: settings for name, settings in _settings(model) if name != DEFAULT}


def _settings(model: GridModel) -> Iterator[tuple[str, dict[str, Any]]]:
    layers = model.num_layers
    half = layers // 2
    slicings = _slicings(model.length)
    one = {"balanced": "auto", "even": [half, half], "half a layer more ahead": [half + 0.5, half - 0.5]}
    for (cut, partition), slices, schedule in product(one.items(), ("4", "8", "8 equal-time"), ("1f1b", "zb-h1")):
        yield _named(schedule, cut, slices, slicings, partition, 1)
    yield _named("1f1b", "balanced", "16", slicings, "auto", 1)
    for schedule in ("1f1b", "zb-h1"):
        yield _named(schedule, "head alone", "8", slicings, [layers, 0], 1)
    ends, six = [0, half, half, 0], _shared(layers, (0, 1, 4, 6, 5, 0))
    quarters = _shared(layers, (4, 4, 4, 4))
    for (cut, partition), slices in product(
        {"quarters": quarters, "empty ends": ends}.items(), ("4", "8", "8 equal-time")
    ):
        yield _named("interleaved-1f1b", cut, slices, slicings, partition, 2)
    yield _named("interleaved-1f1b", "six stages", "8", slicings, six, 3)
    for schedule, slices in product(("zb-v", "auto-v"), ("4", "8 equal-time")):
        yield _named(schedule, "quarters", slices, slicings, quarters, 2)
    for cut, partition, stages in (("balanced", "auto", 1), ("empty ends", ends, 2), ("six stages", six, 3)):
        for slices in ("6 equal-time", "short ends"):
            yield _named("auto", cut, slices, slicings, partition, stages)


def _named(
    schedule: str, cut: str, slices: str, slicings: Mapping[str, Any], partition: Any, stages: int
) -> tuple[str, dict[str, Any]]:
    settings = {"schedule": schedule, "slices": slicings[slices], "partition": partition, "stages_per_rank": stages}
    return f"{schedule}, {cut}, {slices}{' slices' if slices[0].isdigit() else ''}", settings


def _slicings(length: int) -> dict[str, Any]:
    """Returns slices by name; short ends are those of the README's first cut by hand."""
    found: dict[str, Any] = {str(count): count for count in (4, 8, 16)}
    unit = min(_UNIT, length // 16)
    for count in (6, 8):
        found[f"{count} equal-time"] = [*equal_time_slices(length, count, _ATTENTION, Cuts(unit))]
    return found | {"short ends": [length * part // 32 for part in (6, 10, 11, 5)]}


def _shared(layers: int, parts: Sequence[int]) -> list[float]:
    """Returns the layers of each stage, in halves, by shares of 16ths."""
    bounds = [round(2 * layers * part / 16) / 2 for part in accumulate(parts, initial=0)]
    return [b - a for a, b in pairwise(bounds)]
