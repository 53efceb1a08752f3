"""The FLOPs of a step, the utilisation of the devices, and the time that training takes.

FLOPs are those of matrix products, two for a multiplication with its addition (PTD-P appendix A), in any precision.
They are counted by running the model's code; PTD-P's formulas for a GPT of the same size are given for comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import HalfLayer, LayerHalf, LayerRange, ModelEnd
from slipstream.model.saving import RecomputePolicy
from slipstream.pipeline.families import StageLayout
from slipstream.planner.costs import AttentionCall, ModelCount, PartCount
from slipstream.profiler import count_model
from slipstream.schedule import Op
from slipstream.training.metrics.device_peak import DevicePeak

_TERA = 1e12


@dataclass(frozen=True)
class RunFigures:
    """The figures of a whole run. FLOPs are those of a step."""

    num_parameters: int
    num_devices: int
    tokens_per_step: int
    model_flops: float  # of whole sequences
    peak_flops: float  # per second, of one device
    peak_source: str  # a data sheet, or which product was measured
    ptdp_num_parameters: float  # eq. 2, of a GPT with as many layers, hidden sizes and tokens
    ptdp_flops: float  # eq. 3 for it, without the recomputation that the equation assumes


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step of all devices; figures per device are means.

    `model_flops` are what the mathematics needs: forward, and twice as much backward. `hardware_flops` add what is
    recomputed (Korthikanti et al. 2022, section 6.4). MFU and HFU are their rates over the devices' peak.
    """

    tokens_per_second: float
    model_flops: float
    hardware_flops: float
    tflops_per_device: float  # model FLOPs, 10^12 a second
    hardware_tflops_per_device: float  # PTD-P's figure, since PTD-P recomputes everything
    mfu: float
    hfu: float


@dataclass(frozen=True)
class TrainingTime:
    """The seconds that training on some number of tokens takes."""

    measured: float  # at the step's rate
    ptdp: float  # 8TP/(nX), which leaves out attention's scores


class FlopsMeter:
    """Counts the FLOPs of a model once, and then turns the seconds of each step into rates.

    Scores of attention count where the mask lets a query see a key, as in the plan's MFU: these must be computed.
    PTD-P and others count all scores, twice as many, which flatters long sequences.

    Args:
        config: the configuration of the whole model.
        seq_len: tokens of a sequence.
        batch_size: sequences of a step, over all replicas.
        num_devices: devices of the whole mesh.
        peak: the peak of one device; see `find_peak`.

    Raises:
        SlipstreamError: if the operations of the architecture can't be counted.
    """

    def __init__(
        self, config: PretrainedConfig, seq_len: int, batch_size: int, num_devices: int, peak: DevicePeak
    ) -> None:
        self.count = count_model(config, seq_len)
        self.seq_len, self.batch_size, self.num_devices = seq_len, batch_size, num_devices
        self._peak = peak
        self._text = config.get_text_config()
        whole = _Forward.of(self.count)
        self._products = whole.products * self.tokens_per_step
        self._calls = whole.calls
        self._scores = batch_size * whole.scores(0, seq_len)
        self._last: tuple[StageLayout | None, tuple[int, ...]] = None, ()  # what the following line was counted for
        self._again = 0.0, 0.0

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def run(self) -> RunFigures:
        """The figures that hold for every step."""
        layers, hidden = self._text.num_hidden_layers, self._text.hidden_size
        vocabulary, length = self._text.vocab_size, self.seq_len
        weights = 12 * layers * hidden**2
        ends = (vocabulary + length) / (12 * layers * hidden)
        forward = 2 * weights * (1 + length / (6 * hidden)) + 2 * hidden * vocabulary  # of a token
        return RunFigures(
            num_parameters=self.count.num_parameters,
            num_devices=self.num_devices,
            tokens_per_step=self.tokens_per_step,
            model_flops=3 * (self._products + self._scores),
            peak_flops=self._peak.flops,
            peak_source=self._peak.source,
            ptdp_num_parameters=weights * (1 + 13 / (12 * hidden) + ends),
            ptdp_flops=self.tokens_per_step * 3 * forward,
        )

    def of_step(
        self,
        seconds: float,
        layout: StageLayout | None = None,
        slices: Sequence[int] = (),
        documents: Sequence[int] | None = None,
    ) -> StepFigures:
        """Returns the figures of a step.

        Args:
            seconds: the time that the step took.
            layout: what ran; its R actions are what every replica recomputed. None: nothing was recomputed.
            slices: the tokens of each slice of a sequence.
            documents: the tokens of each document of the batch, which attends to itself alone; see `document_lengths`.
                Default: every sequence is one document.
        """
        scores = self._scores
        if documents is not None:
            if sum(documents) != self.tokens_per_step:
                raise SlipstreamError(
                    f"the documents have {sum(documents)} tokens, but a step has {self.batch_size} sequences of "
                    f"{self.seq_len}. Give the lengths of all documents of the whole batch."
                )
            scores = sum(_scores(self._calls, 0, length) for length in documents)
        products_again, scores_again = self._recomputed(layout, slices)
        model = 3 * (self._products + scores)
        hardware = model + products_again + scores_again * scores / self._scores
        device_seconds = seconds * self.num_devices
        return StepFigures(
            tokens_per_second=self.tokens_per_step / seconds,
            model_flops=model,
            hardware_flops=hardware,
            tflops_per_device=model / device_seconds / _TERA,
            hardware_tflops_per_device=hardware / device_seconds / _TERA,
            mfu=model / device_seconds / self._peak.flops,
            hfu=hardware / device_seconds / self._peak.flops,
        )

    def time_to_train(self, tokens: float, seconds_per_step: float) -> TrainingTime:
        """Returns the seconds that training on `tokens` takes, at the measured rate and by PTD-P section 5.1, 8TP/(nX).

        The paper's X counts a recomputed forward, four passes for three, and so does this, whether or not there is one.
        """
        achieved = 4 / 3 * self.run.model_flops / (self.num_devices * seconds_per_step)
        return TrainingTime(
            measured=tokens / self.tokens_per_step * seconds_per_step,
            ptdp=8 * tokens * self.count.num_parameters / (self.num_devices * achieved),
        )

    def _recomputed(self, layout: StageLayout | None, slices: Sequence[int]) -> tuple[float, float]:
        """Returns the recomputed FLOPs of products and of scores; counts again only for a new layout or new slices."""
        if layout is None:
            return 0.0, 0.0
        if self._last[0] is not layout or self._last[1] != tuple(slices):
            self._again = recomputed_flops(self.count, layout, slices, self.batch_size)
            self._last = layout, tuple(slices)
        return self._again


def document_lengths(document_ids: Tensor) -> list[int]:
    """Returns the length of each run of equal ids in a (batch, sequence) tensor, row by row."""
    return [int(count) for row in document_ids for count in torch.unique_consecutive(row, return_counts=True)[1]]


def recomputed_flops(
    count: ModelCount, layout: StageLayout, slices: Sequence[int], num_sequences: int
) -> tuple[float, float]:
    """Returns the FLOPs that the R actions of a step compute: of matrix products, and of attention's scores.

    Selective recomputation keeps both, so it repeats none. Otherwise the forward of a slice is counted, through the
    layers that are recomputed; the little that a replay leaves out at its end is not subtracted. Of a layer that is cut
    in half, each half has half of the products, and the half with attention has the scores.
    """
    what = layout.recompute
    if what is None or what.keeps_products:
        return 0.0, 0.0
    ends = [*accumulate(slices, initial=0)]
    rows = [len(part) for part in torch.arange(num_sequences).tensor_split(layout.training.num_microbatches)]
    forwards = [_Forward.repeated(count, layout.layers, stage, what) for stage in range(len(layout.layers))]
    products = scores = 0.0
    for action in layout.training.positions:
        if action.op is Op.R:
            forward, size, first = forwards[action.stage], rows[action.microbatch], ends[action.slice]
            products += size * slices[action.slice] * forward.products
            scores += size * forward.scores(first, ends[action.slice + 1])
    return products, scores


@dataclass(frozen=True)
class _Forward:
    """A forward of some layers: the FLOPs of a token's matrix products, and every attention call."""

    products: float
    calls: Counter[AttentionCall]

    @classmethod
    def of(cls, count: ModelCount) -> _Forward:
        """Counts the whole model."""
        parts = count.counted(count.whole)
        calls = Counter(call for number, part in parts for call in part.attentions * number)
        return cls(sum(number * _products(part) for number, part in parts), calls)

    @classmethod
    def repeated(cls, count: ModelCount, stages: Sequence[LayerRange], stage: int, what: RecomputePolicy) -> _Forward:
        """Counts what a replay runs: the first layers of a stage, or all of them with the head and the loss."""
        products = 0.0
        calls: Counter[AttentionCall] = Counter()
        layers = (each for each in stages[stage] if not isinstance(each, ModelEnd))
        for each in islice(layers, what.num_layers):
            layer, half = each if isinstance(each, HalfLayer) else (each, None)
            part = count.layers[count.kinds[layer]]
            products += _products(part) * (1.0 if half is None else 0.5)
            calls.update(part.attentions if half is not LayerHalf.FEED_FORWARD else ())
        products += _products(count.embedding) if stage == 0 else 0.0
        if what.num_layers is None and stage == len(stages) - 1:
            products += _products(count.head)
        return cls(products, calls)

    def scores(self, first: int, end: int) -> float:
        """Returns the FLOPs of one sequence's queries in [first, end): the products with keys and with values."""
        return _scores(self.calls, first, end)


def _products(part: PartCount) -> float:
    return part.ops[Op.F].flops.per_token


def _scores(calls: Counter[AttentionCall], first: int, end: int) -> float:
    total = 0.0
    for call, number in calls.items():
        num_scores = number * call.num_heads * float(call.window.scores(end) - call.window.scores(first))
        total += 2 * num_scores * (call.key_width + call.value_width)
    return total
