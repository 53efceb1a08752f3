"""Measures a model: builds stages, times them at many points, and returns the profile."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import transformers
from transformers import PretrainedConfig

from slipstream.attention import chosen_kernels
from slipstream.cost import Hardware, MeasuredLink, ModelIdentity, Profile, choose_stages, part_kinds
from slipstream.errors import SlipstreamError
from slipstream.hardware_name import processor_name
from slipstream.model import (
    CausalLMStage,
    LayerRange,
    ModelAnatomy,
    ModelEnd,
    check_length,
    copy_with_shared_weights,
    model_for_timing,
    torch_dtype,
)
from slipstream.number_format import AUTOCAST, FORMATS, PRECISIONS, weight_format
from slipstream.options import Parallelism
from slipstream.parallel import Ranks, SharedStages
from slipstream.profile.layer_kinds import anatomy_with_halves, find_layer_kinds, find_unit_kinds
from slipstream.profile.measurement_run import MeasurementRun, MeasuringTeams, TimeBudget, make_grid, make_short_grid
from slipstream.profile.stage_bench import StageBench, seconds_of
from slipstream.version import __version__

# The formats of weights by the name of a profile's dtype
_DTYPES = (*FORMATS, AUTOCAST)
_LONGEST_SLICE = 8192  # tokens by default; the logits of more would rarely fit
_OPTIMIZER_REPEATS = 5
_DOUBT = 0.005  # doubt of a point's median; small, as a plan's stages add up many points
_DOUBT_OF_FEW = 0.04  # between the two shortest samples of an op
_CACHES = 128 * 2**20  # bytes: many times a core's share of a CPU's caches


@dataclass(frozen=True)
class ProfileSettings:
    """The settings of a profile: which points are measured, and for how long."""

    seq_len: int
    microbatch_size: int = 1
    dtype: str = "float32"
    longest_slice: int | None = None  # default: the sequence, at most 8192
    granularity: int | None = None  # common divisor of slice lengths; default: a 32nd of the longest slice
    repeats: int = 15  # largest number of rounds per point
    budget: float = 120.0  # seconds of measuring, without building the stages
    few_points: bool = False  # True if a few points are enough, none of them held out of the fit
    parallel: Parallelism = Parallelism()  # the ways in which ranks share a stage's work

    def check(self, config: PretrainedConfig) -> None:
        """Raises SlipstreamError where a model can't be measured so."""
        if self.dtype not in _DTYPES:
            raise SlipstreamError(f"dtype={self.dtype!r} isn't known; choose one of {', '.join(_DTYPES)}.")
        for name, value in (
            ("seq_len", self.seq_len),
            ("microbatch_size", self.microbatch_size),
            ("granularity", self.step),
        ):
            if value < 1:
                raise SlipstreamError(f"{name}={value}: give a whole number from 1.")
        if not 1 <= self.longest <= self.seq_len:
            raise SlipstreamError(
                f"longest_slice={self.longest}: no slice is longer than the sequence, seq_len={self.seq_len}. "
                f"Give 1 to {self.seq_len}, or leave it out."
            )
        if self.budget <= 0:
            raise SlipstreamError(f"budget={self.budget:g}: give seconds above 0, such as 60.")
        if self.repeats < 2:
            raise SlipstreamError(f"repeats={self.repeats}: give at least 2, so that there is a spread.")
        check_length(config, self.seq_len)

    def to_json(self) -> dict[str, Any]:
        """Returns the settings as JSON can have them, without those that don't change costs."""
        parallel = {name: getattr(self.parallel, name) for name in Parallelism.model_fields if name != "shard"}
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"parallel": parallel}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(**values | {"parallel": Parallelism(**values["parallel"])})

    @property
    def longest(self) -> int:
        """The number of tokens of the longest slice."""
        return self.longest_slice or min(self.seq_len, _LONGEST_SLICE)

    @property
    def step(self) -> int:
        """The number of tokens of which all measured lengths are multiples."""
        return self.granularity or max(1, self.longest // 32)


def profile_model(
    config: PretrainedConfig,
    settings: ProfileSettings,
    device: torch.device,
    link: MeasuredLink | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
    ranks: Ranks | None = None,
    on_growth: Callable[[float], None] | None = None,
) -> Profile:
    """Returns the times, on this rank's machine, of a causal LM with random weights.

    Collective in a process group: every rank calls it, and all measure at the same time. CPU ranks of one host measure
    a share of the points each, and all of them return the same times. Of weights, tokens and experts a rank has the
    share that it has on the mesh; its times include the exchanges in an action. Of a slice that ranks share, the times
    are those of all its tokens.

    Args:
        config: the model's config; only a few of its layers are built.
        settings: the points to measure, and for how long.
        device: the device to measure on.
        link: the times of messages between ranks, if they were measured.
        on_progress: called with the fraction of the budget that is spent.
        ranks: of the mesh. Default: all processes are a pipeline's.
        on_growth: called with the seconds that a fit needs, where the budget is too small for one and grows to that.
            None: too small a budget is an error.

    Raises:
        SlipstreamError: settings that can't be measured, a model that can't be cut or shared, or too small a budget.
    """
    ranks = ranks or Ranks.of()
    settings.check(config)
    anatomy = anatomy_with_halves(config)
    kinds, names = find_layer_kinds(config, anatomy)
    units_per_layer = 2 if anatomy.halves else 1
    unit_kinds = find_unit_kinds(config, anatomy, kinds)
    parts = choose_stages(part_kinds(kinds, units_per_layer, unit_kinds))
    computed = torch_dtype(PRECISIONS[AUTOCAST].computed.name)
    with torch.autocast(device.type, computed, enabled=settings.dtype == AUTOCAST):
        cuts = [_cut(anatomy, stage, len(kinds)) for stage in parts]
        benches = make_benches(config, settings, device, cuts, ranks)
        make = make_short_grid if settings.few_points else make_grid
        grid = make(settings.seq_len, settings.longest, settings.step)
        budget = TimeBudget(settings.budget, ranks, on_progress, on_growth)
        doubt = _DOUBT_OF_FEW if settings.few_points else _DOUBT
        teams = MeasuringTeams.of(ranks, deals=device.type == "cpu")
        stages = MeasurementRun(benches, parts, grid, budget, teams, settings.repeats, doubt).run()
    return Profile(
        hardware=identify_hardware(device, ranks.world.size),
        model=identify_model(config),
        versions=versions(),
        dtype=settings.dtype,
        dtype_bytes=benches[0].stage.hidden_dtype.itemsize,
        microbatch_size=settings.microbatch_size,
        seq_len=settings.seq_len,
        kinds=kinds,
        kind_names=names,
        units_per_layer=units_per_layer,
        stages=stages,
        optimizer_seconds=_optimizer_seconds(benches[0].stage, device),
        link=link,
        degrees=settings.parallel.shared_by(ranks.degrees),
        sequence_parallel=settings.parallel.sequence_parallel and ranks.tensor.size > 1,
        tensor_plan=settings.parallel.tensor_plan if ranks.tensor.size > 1 else None,
        attention_kernels=chosen_kernels(),
        unit_kinds=unit_kinds,
        disturbed=max(bench.disturbed for bench in benches),
    )


def make_benches(
    config: PretrainedConfig,
    settings: ProfileSettings,
    device: torch.device,
    cuts: Sequence[tuple[LayerRange, ModelAnatomy]],
    ranks: Ranks | None = None,
) -> list[StageBench]:
    """Returns a bench for every stage, over shared weights where stages have layers in common.

    A stage's anatomy says whether it has the ends of the model (`separate_ends`). The ranks of a team share every
    stage.
    """
    ranks = ranks or Ranks.of()
    owned = {layer for cut, _ in cuts for layer in cut.layers} | {*ModelEnd}
    ends = replace(cuts[0][1], separate_ends=frozenset(ModelEnd))
    model = model_for_timing(config, ends, owned, device, torch_dtype(weight_format(settings.dtype).name)).train()
    shared = SharedStages.of(config, ends, ranks, settings.parallel)
    shared.shard(model)
    others = None
    # This tensor is as large as the weights and gradients.
    if device.type == "cpu":
        others = torch.ones(min(2 * sum(parameter.nbytes for parameter in model.parameters()), _CACHES) // 4)
    made = [CausalLMStage(copy_with_shared_weights(model), part, cut, device, **vars(shared)) for cut, part in cuts]
    sizes = settings.microbatch_size, settings.seq_len
    return [StageBench(stage, *sizes, others, shared.tensor, ranks) for stage in made]


def _cut(anatomy: ModelAnatomy, parts: range, num_layers: int) -> tuple[LayerRange, ModelAnatomy]:
    """Returns the layers of a stage, and the anatomy that says whether it has the model's ends."""
    units = 2 if anatomy.halves else 1
    last = num_layers * units + 1  # the number of the head
    start, stop = ((min(max(part, 1), last) - 1) / units for part in (parts.start, parts.stop))
    separate = set()
    if parts.start > 0 or parts.stop == 1:
        separate.add(ModelEnd.EMBEDDING)
    if parts.stop <= last or parts.start == last:
        separate.add(ModelEnd.HEAD)
    return LayerRange(start, stop), replace(anatomy, separate_ends=frozenset(separate))


def _optimizer_seconds(stage: CausalLMStage, device: torch.device) -> float:
    """Returns the seconds of AdamW per parameter."""
    parameters = [parameter for _, parameter in stage.named_parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    seconds = [seconds_of(optimizer.step, device) for _ in range(_OPTIMIZER_REPEATS)]
    return statistics.median(seconds[1:]) / sum(parameter.numel() for parameter in parameters)


# Settings of a configuration that say where it came from and how it is loaded
_ORIGIN = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
# Other settings that change no cost
_FREE = {"bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "return_dict", "use_cache"}


def identify_hardware(device: torch.device, num_processes: int = 1) -> Hardware:
    """Returns the present hardware, on which `num_processes` compute at the same time."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Hardware(name, processor_name(), os.cpu_count() or 1, torch.get_num_threads(), num_processes)


def identify_model(config: PretrainedConfig) -> ModelIdentity:
    """Returns the shapes and the hash of a transformers configuration, ignoring token ids and other names."""
    text = config.get_text_config()
    settings = {key: value for key, value in without_origin(config.to_dict()).items() if key not in _FREE}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    return ModelIdentity(
        config.model_type, text.num_hidden_layers, text.hidden_size, text.vocab_size, config_hash=digest[:16]
    )


def without_origin(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration's settings, without those that say where it came from and how it is loaded."""
    return {key: value for key, value in settings.items() if key not in _ORIGIN}


def versions() -> dict[str, str]:
    """Returns the versions of the software that computes."""
    packages = {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }
    return packages | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
