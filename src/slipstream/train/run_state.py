"""The state of a run in a checkpoint, from which it can be resumed: the tensors of a rank, and facts."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from slipstream.checkpoint import (
    Checkpoints,
    SavedCheckpoint,
    TensorShard,
    decode,
    describe_rule,
    encode,
    kept_parts,
    load_training,
    loop_facts,
    training_shards,
)
from slipstream.errors import SlipstreamError
from slipstream.pipeline import Pipeline, describe_model
from slipstream.planner.ragged import StageRates
from slipstream.profile import versions
from slipstream.train.data import TokenisedText, TrainingSequences
from slipstream.train.data.tokenised_text import Array
from slipstream.train.loss_scale import LossScale
from slipstream.train.recorded_plan import chosen_facts
from slipstream.train.run_context import RunContext

_READ_AT_ONCE = 2**24  # tokens


def run_shards(pipe: Pipeline, optimizer: Optimizer) -> Iterator[TensorShard]:
    """Yields the shards of this rank's parameters, as its optimizer updates them, and of the optimizer's state of each;
    of a model with an adapter, those of the adapter.

    Raises SlipstreamError for state that no other mesh could load.
    """
    return training_shards(kept_parts(pipe.parameter_shards(), pipe.adapter is not None), optimizer)


def load_run(checkpoints: Checkpoints, saved: SavedCheckpoint, pipe: Pipeline, optimizer: Optimizer) -> None:
    """Fills the shards of `run_shards`; the optimizer then has the checkpoint's state and no other. Collective.

    Raises SlipstreamError, on all ranks and before any tensor is changed, where the checkpoint doesn't fit.
    """
    load_training(checkpoints, saved, kept_parts(pipe.parameter_shards(), pipe.adapter is not None), optimizer)


class RunState:
    """The progress of a run, apart from its tensors."""

    def __init__(
        self,
        run: RunContext,
        pipe: Pipeline,
        scheduler: LambdaLR,
        loss_scale: LossScale,
        sequences: TrainingSequences,
        rates: StageRates | None,
    ) -> None:
        """`rates` are the stages', by which steps on documents of any length are planned, where they were measured."""
        self._settings = run.config.model_dump(mode="json")
        self._pipe = pipe
        self._scheduler = scheduler
        self._loss_scale = loss_scale
        self._sequences = sequences
        # An adapter belongs to these weights.
        self._base = describe_base(str(run.config.model.path)) if pipe.adapter is not None and pipe.leads else None
        self._rates = rates
        # Computed once, as it reads all of the text.
        self._data = describe_data(sequences)
        self.step = 0
        self.num_samples = 0  # sequences trained on

    def facts(self) -> dict[str, Any]:
        """Returns the facts that a checkpoint keeps next to the tensors, as JSON can hold them."""
        pipe = self._pipe
        scheduler = self._scheduler
        samples = encode({"num_samples": self.num_samples}, "facts")
        rule = describe_rule(scheduler.optimizer, scheduler)
        return {
            **loop_facts(rule, samples, pipe.random_state),
            "step": self.step,
            "num_samples": self.num_samples,
            "data": self._data,
            "stream": self._sequences.state(self.num_samples),
            "settings": self._settings,
            "model": describe_model(pipe.config),
            "base": self._base,
            "loss_scale": dict(self._loss_scale.state_dict()),
            "tuned": chosen_facts(pipe, self._sequences, self._rates),
            "mesh": {axis: group.size for axis, group in pipe.axes.items()},
            "versions": versions(),
        }

    def restore(self, facts: dict[str, Any]) -> None:
        """Takes over the facts of a checkpoint whose tensors are loaded.

        Raises:
            SlipstreamError: if the checkpoint was trained on different data.
        """
        check_data(facts["data"], self._data)
        self.step = facts["step"]
        self.num_samples = facts["num_samples"]
        if stream := facts["stream"]:
            self._sequences.go_to(stream)
        seed, num_steps = facts["loop"]["random_state"]
        self._pipe.random_state = seed, num_steps
        self._pipe.refresh()
        self._loss_scale.load_state_dict(facts["loss_scale"])
        # The options of optimizer and schedule are the configuration's, which may have others than before.
        scheduler = self._scheduler
        updates = decode(facts["loop"]["scheduler"]["state"])["last_epoch"]
        rates = [base * ratio(updates) for base, ratio in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        same = {"lr_lambdas": [None] * len(rates)}
        scheduler.load_state_dict({"last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates, **same})
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def describe_data(sequences: TrainingSequences) -> dict[str, Any]:
    """Returns the facts that decide the order of samples."""
    texts = [describe_text(text) for text in sequences.texts]
    of_them = texts[0] if len(texts) == 1 else {"sources": texts, "weights": sequences.weights}
    if sequences.origin is not None:
        of_them = {**sequences.origin}
    grouped = {"group_size": sequences.group_size} if sequences.group_size > 1 else {}
    return {**of_them, "seq_len": sequences.seq_len, "seed": sequences.seed, "packing": sequences.packing, **grouped}


def describe_text(text: TokenisedText) -> dict[str, Any]:
    """Returns the facts that tell the tokens and the labels of a text from others."""
    facts = {"num_tokens": len(text.tokens), "crc32": _checksum(text.tokens)}
    rated = {} if text.ratings is None else {"ratings_crc32": zlib.crc32(text.ratings.tobytes())}
    return facts if text.labels is None else {**facts, "labels_crc32": _checksum(text.labels), **rated}


def _checksum(array: Array) -> int:
    """Returns the checksum of an array; one on the disk is read in parts, of which none stays in memory."""
    checksum = 0
    for begin in range(0, len(array), _READ_AT_ONCE):
        checksum = zlib.crc32(array[begin : begin + _READ_AT_ONCE].data, checksum)
        if isinstance(array, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
            array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    return checksum


def check_data(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises SlipstreamError, with the difference, where `describe_data` of a checkpoint isn't that of this run."""
    values = ((key, was.get(key), now.get(key)) for key in {**now, **was})
    different = [f"{key} was {before!r}, is {value!r}" for key, before, value in values if value != before]
    if different:
        raise SlipstreamError(
            f"the checkpoint was trained on different data: {'; '.join(different)}. Resume with the settings it was "
            "saved with, or train from the beginning in another folder."
        )


_BLOCK = 2**16  # bytes read of a file at each of several places
_PLACES = 64


def describe_base(path: str) -> dict[str, Any]:
    """Returns the facts that tell the weights in a folder from others: of each file its size and a checksum of its
    header and of blocks at equal distances; of a name on the hub that name."""
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors"))
    return {"files": {file.name: _describe(file) for file in files}} if files else {"name": path}


def differs(saved: Mapping[str, Any] | None, path: str) -> bool:
    """Returns whether the weights at `path` aren't those that a checkpoint's adapter was trained on."""
    return saved is not None and dict(saved) != describe_base(path)


def _describe(file: Path) -> list[int]:
    size = file.stat().st_size
    checksum = 0
    with file.open("rb") as opened:
        for start in sorted({size * place // _PLACES for place in range(_PLACES)}):
            opened.seek(start)
            checksum = zlib.crc32(opened.read(_BLOCK), checksum)
    return [size, checksum]
