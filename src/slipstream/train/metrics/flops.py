"""The FLOPs of a step, and the utilisation of the devices.

FLOPs are those of matrix products, two for a multiplication with its addition (PTD-P appendix A), in any precision.
They are counted by running the model's code; PTD-P's formulas for a GPT of the same size are given for comparison.

Where all weights are trained, a step takes three times the FLOPs of its forwards: a backward computes a gradient of the
input and one of the weights, each as large. With frozen weights, of T tokens of which a layer sees S scores,

    model FLOPs = sum over parts of  T (F + I [a trained weight is below, or in it] + W) + S (f + 2 f [the same])

where F, I and W are a token's products forward, to the input and to the trained weights alone, and f those of a score.
A part's own I is counted as far down as its lowest trained weight. An adapter's products are part of all three.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from transformers import PretrainedConfig

from slipstream.atomic_files import cache_folder, keep_measured, read_kept
from slipstream.cost import AttentionCall, ModelCount, PartCount, clusters_named
from slipstream.model import ALL_WEIGHTS, HalfLayer, LayerHalf, LayerRange, ModelEnd, TrainedWeights
from slipstream.pipeline import StageLayout
from slipstream.profile import count_model, identify_hardware, seconds_of
from slipstream.schedule import Op, SlicedMicrobatch

_TERA = 1e12


@dataclass(frozen=True)
class RunFigures:
    """The figures of a whole run. FLOPs are those of a step."""

    num_parameters: int
    num_trained: int  # the trained ones among them
    num_devices: int
    tokens_per_step: int
    model_flops: float  # operations on whole sequences
    peak_flops: float  # per second, of one device
    peak_source: str  # a data sheet, or the measured product
    ptdp_num_parameters: float  # eq. 2, for a GPT with the same number of layers, hidden size and tokens
    ptdp_flops: float  # eq. 3 for that GPT, without the recomputation that the equation assumes


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step of all devices; figures per device are means.

    `model_flops` are those that the mathematics needs: forward, and twice as much backward, or less where weights are
    frozen. `hardware_flops` add the recomputed ones (Korthikanti et al. 2022, section 6.4). MFU and HFU are their rates
    over the devices' peak.
    """

    tokens_per_second: float
    model_flops: float
    hardware_flops: float
    tflops_per_device: float  # model FLOPs, 10^12 a second
    hardware_tflops_per_device: float  # PTD-P's figure, since PTD-P recomputes everything
    mfu: float
    hfu: float


class FlopsMeter:
    """Counts the FLOPs of a model once, and then turns the seconds of each step into rates.

    Scores of attention count where the mask lets a query see a key, as in the plan's MFU: these must be computed.
    PTD-P and others count all scores, twice as many, which flatters long sequences.

    Args:
        config: the configuration of the whole model.
        seq_len: tokens of a sequence; where they differ, the mean.
        batch_size: sequences of a step, over all replicas.
        num_devices: devices of the whole mesh.
        peak: the peak of one device; see `find_peak`.
        trained: which weights are trained.

    Raises:
        SlipstreamError: if the operations of the architecture can't be counted.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        seq_len: int,
        batch_size: int,
        num_devices: int,
        peak: DevicePeak,
        trained: TrainedWeights = ALL_WEIGHTS,
    ) -> None:
        self.count = count_model(config, seq_len, trained=trained, halves=False)
        self._seq_len = seq_len
        self._batch_size = batch_size
        counted = self.count.counted(self.count.whole)
        self._whole = _Forward.of((part, None) for repetitions, part in counted for _ in range(repetitions))
        # Products of a token.
        self._products = sum(repetitions * part.step_products.per_token for repetitions, part in counted)
        self._counted: tuple[object, tuple[float, float, float]] = None, (0.0, 0.0, 1.0)  # the last recomputation
        text = config.get_text_config()
        layers = text.num_hidden_layers
        hidden = text.hidden_size
        weights = 12 * layers * hidden**2
        forward = 2 * weights * (1 + seq_len / (6 * hidden)) + 2 * hidden * text.vocab_size  # FLOPs of a token
        # The figures hold for every step.
        self.run = RunFigures(
            num_parameters=self.count.num_parameters,
            num_trained=self.count.num_trained,
            num_devices=num_devices,
            tokens_per_step=batch_size * seq_len,
            model_flops=batch_size * (self._products * seq_len + self._whole.step_scores(seq_len)),
            peak_flops=peak.flops,
            peak_source=peak.source,
            ptdp_num_parameters=float(weights + 13 * layers * hidden + hidden * (text.vocab_size + seq_len)),
            ptdp_flops=batch_size * seq_len * 3 * forward,
        )

    def of_step(
        self,
        seconds: float,
        layout: StageLayout | None = None,
        microbatches: Sequence[SlicedMicrobatch] = (),
        documents: Sequence[int] | None = None,
    ) -> StepFigures:
        """Returns the figures of a step.

        Args:
            seconds: the time that the step took.
            layout: the stages and actions; its policy and R actions tell what every replica recomputed. None: nothing.
            microbatches: the rows of each microbatch of a replica, and the tokens of its slices.
            documents: the tokens of each document of the whole batch, which attends to itself alone. Default: every
                sequence is one document, of `seq_len` tokens.
        """
        run = self.run
        whole = self._whole
        lengths = [self._seq_len] * self._batch_size if documents is None else documents
        tokens = sum(lengths)
        scores = sum(whole.scores(0, length) for length in lengths)
        model = tokens * self._products + sum(map(whole.step_scores, lengths))
        ran = layout, tuple(microbatches), tokens
        if self._counted[0] != ran:
            self._counted = ran, self._recomputed(layout, microbatches, tokens)
        products_again, scores_again, in_whole_rows = self._counted[1]
        hardware = model + products_again + scores_again * scores / in_whole_rows
        device_seconds = seconds * run.num_devices
        return StepFigures(
            tokens_per_second=tokens / seconds,
            model_flops=model,
            hardware_flops=hardware,
            tflops_per_device=model / device_seconds / _TERA,
            hardware_tflops_per_device=hardware / device_seconds / _TERA,
            mfu=model / device_seconds / run.peak_flops,
            hfu=hardware / device_seconds / run.peak_flops,
        )

    def _recomputed(
        self, layout: StageLayout | None, microbatches: Sequence[SlicedMicrobatch], tokens: int
    ) -> tuple[float, float, float]:
        """Returns the FLOPs of products and of scores that are computed again, and those of all scores in rows that are
        each one document, were every replica like this one."""
        rows = [(m.num_sequences, sum(m.slices)) for m in microbatches] or [(self._batch_size, self._seq_len)]
        replicas = tokens / sum(num_rows * length for num_rows, length in rows)
        scores = replicas * sum(num_rows * self._whole.scores(0, length) for num_rows, length in rows)
        return *recomputed_flops(self.count, layout, microbatches, replicas), scores


def recomputed_flops(
    count: ModelCount, layout: StageLayout | None, microbatches: Sequence[SlicedMicrobatch], replicas: float
) -> tuple[float, float]:
    """Returns the FLOPs that a step computes again, in R actions and within backwards: of matrix products, and of
    attention's scores.

    Selective recomputation keeps both, so it repeats none. Otherwise the forward of a slice is counted, through the
    layers that are recomputed; the little that a replay leaves out at its end is not subtracted. Of a layer that is cut
    in half, each half has half of the products, and the half with attention has the scores.
    """
    if layout is None or layout.recompute is None or layout.recompute.keeps_products:
        return 0.0, 0.0
    stages = layout.layers
    what = layout.recompute
    numbers = range(len(stages))
    whole = [_Forward.of(_repeated(count, stages, stage)) for stage in numbers]
    layers = [_Forward.of(_repeated(count, stages, stage, what.num_layers)) for stage in numbers]
    again = {Op.R: whole, Op.B: layers, Op.I: layers}
    products = scores = 0.0
    for action in layout.training.positions:
        if action.op in again:
            forward = again[action.op][action.stage]
            rows = microbatches[action.microbatch]
            first = sum(rows.slices[: action.slice])
            tokens = rows.slices[action.slice]
            size = rows.num_sequences
            products += replicas * size * tokens * forward.products
            scores += replicas * size * forward.scores(first, first + tokens)
    return products, scores


@dataclass(frozen=True)
class _Forward:
    """A forward of some layers: the FLOPs of a token's matrix products, and every attention call."""

    products: float
    calls: Counter[AttentionCall]

    @classmethod
    def of(cls, parts: Iterable[tuple[PartCount, LayerHalf | None]]) -> _Forward:
        """Counts parts of a model: whole ones, and halves of layers."""
        products = 0.0
        calls = Counter[AttentionCall]()
        for part, half in parts:
            products += part.ops[Op.F].flops.per_token * (1.0 if half is None else 0.5)
            calls.update(part.attentions if half is not LayerHalf.FEED_FORWARD else ())
        return cls(products, calls)

    def scores(self, first: int, end: int) -> float:
        """Returns the FLOPs of one sequence's queries in [first, end): the products with keys and with values."""
        counts = self._num_scores(first, end).items()
        return sum(call.flops(num_scores) for call, num_scores in counts)

    def step_scores(self, length: int) -> float:
        """Returns the FLOPs of the scores of a whole sequence in a step, with the backward where there is one."""
        return sum(call.step_flops(num_scores) for call, num_scores in self._num_scores(0, length).items())

    def _num_scores(self, first: int, end: int) -> dict[AttentionCall, float]:
        return {
            call: count * call.num_heads * float(call.window.scores(end) - call.window.scores(first))
            for call, count in self.calls.items()
        }


def _repeated(
    count: ModelCount, stages: Sequence[LayerRange], stage: int, num_layers: float | None = None
) -> Iterator[tuple[PartCount, LayerHalf | None]]:
    """Yields the recomputed parts: a stage's first layers, or all of it with the embedding, the head and the loss."""
    if num_layers is None and stage == 0:
        yield count.embedding, None
    layers = [part for part in stages[stage] if not isinstance(part, ModelEnd)]
    for index, part in enumerate(layers):
        if num_layers is None or index < num_layers:
            layer, half = part if isinstance(part, HalfLayer) else (part, None)
            yield count.layers[count.kinds[layer]], half
    if num_layers is None and stage == len(stages) - 1:
        yield count.head, None


_SIZES = {"cpu": 1024, "cuda": 8192}  # rows of the square matrices
_SECONDS, _AGAIN = 0.5, 0.05  # seconds of measuring: the first time on some hardware, and later
_MOST_PRODUCTS = 50


@dataclass(frozen=True)
class DevicePeak:
    """The FLOP/s of one device, and the source of the number."""

    flops: float
    source: str


def find_peak(device: torch.device, dtype: torch.dtype, share: float = 1.0) -> DevicePeak:
    """Returns the peak that MFU is measured against, for matrix products of `dtype`, of a rank with a `share` of a GPU.

    A CUDA device is looked up by its name in the cluster descriptions that come with Slipstream. For a CPU, an unknown
    device and a dtype without an entry, the fastest of some products is taken: then all ranks of a machine should call
    this at the same time, as they share the machine when they train.
    """
    known = peak_by_name(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    if known is None:
        return measure_peak(device, dtype)
    return known if share == 1 else DevicePeak(share * known.flops, f"{known.source}, {share:.3g} of it for each rank")


def peak_by_name(name: str, dtype: torch.dtype) -> DevicePeak | None:
    """Returns the peak that the descriptions give for a device, named as CUDA does; None where they have none."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        # These products run as TensorFloat-32 or bfloat16, for which the descriptions have no float32 peak.
        return None
    kind = str(dtype).removeprefix("torch.")
    for device in (cluster.device for cluster in clusters_named(name)):
        if kind in device.flops:
            return DevicePeak(device.flops[kind], f"data sheet of {device.name}, {kind}")
    return None


def measure_peak(device: torch.device, dtype: torch.dtype) -> DevicePeak:
    """Returns the rate of the fastest product of two square matrices; takes half a second or so, once.

    It is kept, and returned where this hardware is slower now: busy with something else, it has no lower peak, against
    which the same step would look faster. Where one is kept, a few products show whether it is the fastest.
    """
    n = _SIZES.get(device.type, _SIZES["cuda"])
    kind = str(dtype).removeprefix("torch.")
    hardware = identify_hardware(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    file = cache_folder() / "peaks.json"
    key = json.dumps([kind, *asdict(hardware).values()])
    kept = float(read_kept(file).get(key, 0.0))
    # A generator of its own leaves training's random numbers as they are.
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, n, generator=generator).to(device, dtype) for _ in range(2))
    product = partial(torch.mm, a, b)
    product()  # the first one also pays for memory and for choosing a kernel
    best = float("inf")
    began = time.perf_counter()
    runs = 0
    while runs == 0 or (time.perf_counter() - began < (_AGAIN if kept else _SECONDS) and runs < _MOST_PRODUCTS):
        best = min(best, seconds_of(product, device))
        runs = runs + 1
    flops = 2 * n**3 / best
    if flops > kept:
        keep_measured(file, {**read_kept(file), key: flops})
    return DevicePeak(max(flops, kept), f"measured: {n} x {n} by {n} x {n}, {kind}, on this {device.type}")
