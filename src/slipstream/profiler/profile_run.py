"""The whole measurement: stages built, points timed in turns, fitted, judged, and refined where the fit is off."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import (
    CausalLMStage,
    LayerRange,
    check_length,
    copy_with_shared_weights,
    find_anatomy,
    model_for_timing,
)
from slipstream.pipeline import Ranks
from slipstream.pipeline.families import causal_cross_entropy
from slipstream.planner.costs import (
    OPS,
    AttentionWindow,
    MeasuredLink,
    MeasuredStage,
    Measurement,
    Profile,
    SlicePoint,
    choose_stages,
    fit_times,
)
from slipstream.profiler.layer_kinds import find_layer_kinds
from slipstream.profiler.measurement_grid import MeasurementGrid, make_grid
from slipstream.profiler.profile_identity import identify_hardware, identify_model, versions
from slipstream.profiler.stage_bench import StageBench
from slipstream.schedule import Op

TOLERANCE = 0.02  # TeraPipe's figure for the mean relative error
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "bf16": torch.float32,  # as training.precision=bf16: float32 weights, computed under bfloat16 autocast
}
_LEAST_REPEATS = 3
_REFINEMENTS = 2
_WARM_UP_SHARE = 0.2  # of the budget: points that weren't reached by then are left out
_GRID_SHARE = 0.7  # of the budget, the rest is for refinements
_FEWEST_POINTS = 8
_LONGEST_SLICE = 8192  # tokens, unless told otherwise: the logits of more would rarely fit
_OPTIMIZER_REPEATS = 5
_CACHES = 128 * 2**20  # bytes, many times a core's share of a CPU's caches

_Samples = dict[tuple[int, SlicePoint], dict[Op, list[float]]]  # by stage and point


@dataclass(frozen=True)
class ProfileSettings:
    """What is measured, and for how long."""

    seq_len: int
    microbatch_size: int = 1
    dtype: str = "float32"
    longest_slice: int | None = None  # default: the sequence, at most 8192
    granularity: int | None = None  # slice lengths will be multiples of it; default: a 32nd of the longest
    repeats: int = 15  # of every point, at most
    budget: float = 120.0  # seconds of measuring, the building of the stages not counted

    def check(self) -> None:
        """Raise SlipstreamError for what can't be measured."""
        if self.dtype not in DTYPES:
            raise SlipstreamError(f"dtype={self.dtype!r} isn't known; choose one of {', '.join(DTYPES)}.")
        longest = self.longest_slice or 1
        if (
            min(self.seq_len, self.microbatch_size, longest, self.granularity or 1) < 1
            or longest > self.seq_len
            or self.budget <= 0
        ):
            raise SlipstreamError(f"{self}: all must be positive, and no slice is longer than the sequence.")
        if self.repeats < 2:
            raise SlipstreamError(f"repeats={self.repeats}: give at least 2, so that there is a spread.")

    @property
    def longest(self) -> int:
        """Tokens of the longest slice."""
        return self.longest_slice or min(self.seq_len, _LONGEST_SLICE)

    @property
    def step(self) -> int:
        """Tokens that all measured lengths are multiples of."""
        return self.granularity or max(1, self.longest // 32)


def profile_model(
    config: PretrainedConfig,
    settings: ProfileSettings,
    device: torch.device,
    link: MeasuredLink | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Profile:
    """Measure a causal LM of random weights. In a process group every rank calls it, and all measure side by side.

    Args:
        config: of the model; only a few of its layers are made.
        settings: what, and for how long.
        device: where.
        link: what the ranks' messages cost, if that was measured.
        on_progress: called with the share of the budget that is spent.

    Returns:
        This rank's times.

    Raises:
        SlipstreamError: for settings that can't be, a model that can't be cut, or too small a budget.
    """
    settings.check()
    check_length(config, settings.seq_len)
    ranks = Ranks()
    anatomy = find_anatomy(config)
    kinds, names = find_layer_kinds(config, anatomy)
    layers = choose_stages(kinds)
    dtype = torch.bfloat16 if settings.dtype == "bf16" else None
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        benches = make_benches(config, settings, device, layers)
        windows = [bench.windows() for bench in benches]
        grid = make_grid(settings.seq_len, settings.longest, settings.step)
        watch = _TimeBudget(settings.budget, ranks, on_progress)
        measuring = _MeasurementRun(benches, windows, grid, watch, settings.repeats)
        measuring.run()
        stages = tuple(measuring.stage(index, layers[index]) for index in range(len(benches)))
    return Profile(
        hardware=identify_hardware(device, ranks.size),
        model=identify_model(config),
        versions=versions(),
        dtype=settings.dtype,
        dtype_bytes=benches[0].stage.hidden_dtype.itemsize,
        microbatch_size=settings.microbatch_size,
        seq_len=settings.seq_len,
        kinds=kinds,
        kind_names=names,
        stages=stages,
        optimizer_seconds=_optimizer_seconds(benches[0].stage, device),
        link=link,
    )


def make_benches(
    config: PretrainedConfig, settings: ProfileSettings, device: torch.device, layers: Iterable[range]
) -> list[StageBench]:
    """A bench for every stage, over shared weights where stages have layers in common."""
    layers = list(layers)
    anatomy = find_anatomy(config)
    owned = {layer for stage in layers for layer in stage}
    model = model_for_timing(config, anatomy, owned, device, DTYPES[settings.dtype]).train()
    sizes = (settings.microbatch_size, settings.seq_len, config.get_text_config().vocab_size)
    others = _others(model) if device.type == "cpu" else None
    stages = [
        CausalLMStage(copy_with_shared_weights(model), anatomy, LayerRange(own.start, own.stop), device)
        for own in layers
    ]
    return [StageBench(stage, *sizes, causal_cross_entropy, device, others) for stage in stages]


def _others(model: nn.Module) -> Tensor:
    """As large as the model's weights and gradients, or as many times a core's share of the caches."""
    return torch.ones(min(2 * sum(parameter.nbytes for parameter in model.parameters()), _CACHES) // 4)


class _TimeBudget:
    """The time that is left, on which all ranks agree."""

    def __init__(self, budget: float, ranks: Ranks, on_progress: Callable[[float], None]) -> None:
        self._budget, self._ranks, self._on_progress = budget, ranks, on_progress
        self._began = time.perf_counter()

    def within(self, share: float) -> bool:
        """Whether less than this share of the budget is spent. Collective: brings the ranks in step."""
        spent = self._ranks.gather((time.perf_counter() - self._began) / self._budget)[0]
        self._on_progress(min(1.0, spent))
        return bool(spent < share)

    def agree(self, points: list[SlicePoint]) -> list[SlicePoint]:
        """What the first rank found. Collective: all ranks measure the same."""
        found: list[SlicePoint] = self._ranks.gather(points)[0]
        return found


@dataclass
class _MeasurementRun:
    """Collects seconds for every stage, point and op until the fits are good or the time is over."""

    benches: list[StageBench]
    windows: list[tuple[AttentionWindow, ...]]  # of every bench
    grid: MeasurementGrid
    watch: _TimeBudget
    repeats: int
    samples: _Samples = field(default_factory=lambda: defaultdict(lambda: {op: [] for op in OPS}))

    def run(self) -> None:
        """Warm up, measure the grid, then what is off."""
        self._warm_up()
        self._repeat(self.grid.points, _GRID_SHARE)
        for _ in range(_REFINEMENTS):
            off = self.watch.agree(self._off())
            if not off or not self.watch.within(1.0):
                break
            again = self.grid.refine(off, self.benches[0].seq_len)
            self._round(again, counts=False)
            self._repeat(again, 1.0)

    def stage(self, index: int, layers: range) -> MeasuredStage:
        """What was found about a stage."""
        bench = self.benches[index]
        lengths = sorted({length for length, _ in self.grid.fitted})
        context_bytes, gradient_bytes = bench.context_bytes()
        return MeasuredStage(
            first=layers.start,
            last=layers.stop - 1,
            fits={op: fit_times(self._medians(index, op, self.grid.fitted), self.windows[index]) for op in OPS},
            points={op: tuple(self._measurements(index, op)) for op in OPS},
            activation_bytes=tuple((length, bench.activation_bytes(length)) for length in lengths),
            context_bytes=context_bytes,
            context_gradient_bytes=gradient_bytes,
            num_parameters=sum(parameter.numel() for _, parameter in bench.stage.named_parameters()),
        )

    def _warm_up(self) -> None:
        """Every point once, uncounted; the grid ends where that takes too long."""
        points = self.grid.points
        reached: list[SlicePoint] = []
        for point in points:
            if not self.watch.within(_WARM_UP_SHARE if len(reached) >= _FEWEST_POINTS else 1.0):
                break
            self._round([point], counts=False)
            reached.append(point)
        if len(reached) < min(_FEWEST_POINTS, len(points)):
            raise SlipstreamError(
                f"the budget is spent after {len(reached)} of {len(points)} points, too few for a fit. Give more "
                "time, or a shorter sequence or longest slice."
            )
        self.grid.fitted = [point for point in self.grid.fitted if point in reached]
        self.grid.held_out = [point for point in self.grid.held_out if point in reached]

    def _repeat(self, points: list[SlicePoint], share: float) -> None:
        for repeat in range(self.repeats):
            if repeat >= _LEAST_REPEATS and not self.watch.within(share):
                break
            self._round(points, counts=True)

    def _round(self, points: Iterable[SlicePoint], counts: bool) -> None:
        """All stages at all points in turns, so that what else the machine does meets all of them."""
        for point in points:
            self.watch.within(1.0)
            for index, bench in enumerate(self.benches):
                seconds = bench.run(*point)
                for op in OPS if counts else ():
                    self.samples[index, point][op].append(seconds[op])

    def _off(self) -> list[SlicePoint]:
        """The points where an op is off by more than allowed; none where the mean error is within it."""
        worst: dict[SlicePoint, float] = {}
        held_out: list[float] = []
        for index in range(len(self.benches)):
            for op in OPS:
                fit = fit_times(self._medians(index, op, self.grid.fitted), self.windows[index])
                for point, seconds in self._medians(index, op, self.grid.points).items():
                    error = abs(fit(*point) - seconds) / seconds
                    worst[point] = max(error, worst.get(point, 0.0))
                    held_out += [error] if point in self.grid.held_out else []
        if not held_out or statistics.mean(held_out) <= TOLERANCE:
            return []
        return [point for point, error in worst.items() if error > TOLERANCE]

    def _medians(self, index: int, op: Op, points: Iterable[SlicePoint]) -> dict[SlicePoint, float]:
        return {point: statistics.median(self.samples[index, point][op]) for point in points}

    def _measurements(self, index: int, op: Op) -> Iterable[Measurement]:
        for point in self.grid.points:
            seconds = self.samples[index, point][op]
            middle = statistics.median(seconds)
            low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
            yield Measurement(*point, middle, (high - low) / middle, point in self.grid.held_out)


def _optimizer_seconds(stage: CausalLMStage, device: torch.device) -> float:
    """Seconds of AdamW per parameter."""
    parameters: list[Any] = [parameter for _, parameter in stage.named_parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    seconds = []
    for _ in range(_OPTIMIZER_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    count: int = sum(parameter.numel() for parameter in parameters)
    return statistics.median(seconds[1:]) / count
