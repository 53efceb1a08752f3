"""The checkpoints of a run: saved beside training, found again, and loaded by any mesh of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slipstream.errors import SlipstreamError
from slipstream.parallel import RankGroup
from slipstream.training.checkpoint.background_save import BackgroundSave, what_failed
from slipstream.training.checkpoint.checkpoint_folder import CheckpointFolder
from slipstream.training.checkpoint.dcp_storage import SnapshotWriter
from slipstream.training.checkpoint.manifest import Manifest
from slipstream.training.checkpoint.saved_checkpoint import SavedCheckpoint
from slipstream.training.checkpoint.snapshot import Snapshot
from slipstream.training.checkpoint.tensor_shard import TensorShard
from slipstream.training.checkpoint.verified_files import DamagedError, verify_file


class Checkpoints:
    """Of one folder, on a disk that all ranks share. Every method is collective over `world`, which is all processes.

    Of the checkpoints the newest `keep` stay and, unless `keep_every` is 0, those whose step it divides. `say` gets
    a line of text, the same on every rank, for what went wrong without ending the run.

    A save is written while training goes on. Before the optimizer next changes what is saved, call `keep`: it copies to
    host memory what isn't written by then, which takes as much memory as all the shards that this rank writes. A save
    that fails is told by the next `save`, `wait` or `close`; the checkpoints before stay as they are. After an
    exception, when not all ranks come to `close`, leave it out: the threads end with the process, and what they had
    written isn't taken for a checkpoint.
    """

    def __init__(
        self, folder: Path, world: RankGroup, keep: int = 2, keep_every: int = 0, say: Callable[[str], None] = print
    ) -> None:
        if keep < 1 or keep_every < 0:
            raise SlipstreamError(
                f"keep={keep}, keep_every={keep_every}: keep at least 1, and every 0th (none) or more"
            )
        self._folder, self._world, self._say = CheckpointFolder(folder), world, say
        self._keep, self._keep_every = keep, keep_every
        self._snapshot = Snapshot()
        self._saving: BackgroundSave | None = None
        # What a save's ranks tell each other goes beside training's own messages.
        self._beside = RankGroup(dist.new_group(world.global_ranks, backend="gloo")) if world.size > 1 else world

    def prepare(self) -> None:
        """Before training: makes the folder and removes what an interrupted save left.

        Raises SlipstreamError where it can't be written.
        """
        problem = self._on_first(lambda: _try(self._folder.prepare))
        if problem:
            raise SlipstreamError(
                f"no checkpoints can be written to {self._folder.path}: {problem}. Choose another folder."
            )

    def save(self, step: int, shards: Sequence[TensorShard], facts: Mapping[str, Any]) -> None:
        """Returns at once; what the shards hold now is written behind the caller's back. They stay as they are until
        `keep`, `wait` or `close` has returned: otherwise the save fails.

        Waits first for the save before. `facts`, those of rank 0, are anything that JSON holds. Each element of each
        tensor is to be written by one rank: ValueError where this rank has one twice, a warning where others do.
        """
        self.wait()
        kept_facts = json.loads(json.dumps(facts))
        problem = self._on_first(lambda: _try(lambda: self._folder.begin(step)))
        if problem:
            self._say(self._and_the_last_one(f"the checkpoint of step {step} was not saved: {problem}"))
            return
        self._snapshot.take(shards, f"rank-{self._world.rank:05d}.safetensors")
        writer = SnapshotWriter(self._folder, step, kept_facts, self._snapshot, self._retire)
        self._saving = BackgroundSave(writer, self._snapshot, self._beside)

    def keep(self) -> None:
        """The shards of the last save may change from now on. Not collective."""
        self._snapshot.keep()

    def wait(self) -> None:
        """Until what is being saved is a checkpoint, or has failed and is said to have."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        warning = self._world.gather(saving.finish())[0]
        if warning:
            self._on_first(lambda: _try(lambda: self._folder.discard(saving.step)))
            self._say(self._and_the_last_one(warning))

    def close(self) -> None:
        """At the end of training: waits, and gives the memory back."""
        self.wait()
        self._snapshot = Snapshot()

    def find(self, wanted: int | Literal["latest", "last-good"] = "latest") -> SavedCheckpoint | None:
        """The checkpoint of a step, or the newest, verified: every byte of every file, the files spread over the ranks.

        None where there is none yet. Where it is damaged, `last-good` says so and takes the newest that isn't;
        otherwise SlipstreamError tells which file is missing, truncated or altered, and which checkpoint is good.
        """
        steps: list[int] = self._on_first(self._folder.steps)
        candidates = self._candidates(wanted, steps)
        damage: list[str] = []
        for step in candidates:
            found = self._verify(step)
            if isinstance(found, SavedCheckpoint):
                return self._judge(found, wanted, damage)
            damage.append(f"the checkpoint of step {step} in {self._folder.path} is damaged: {found}")
        return self._judge(None, wanted, damage)

    def load(self, found: SavedCheckpoint, shards: Sequence[TensorShard]) -> None:
        """Fills the shards' tensors in place, whatever mesh saved them; `writes` makes no difference.

        Raises SlipstreamError, on all ranks and before any tensor is touched, where one isn't in the checkpoint or has
        another shape or dtype there.
        """
        self._raise_alike(found, found.misfits(shards))
        try:
            found.load(shards, self._world)
        except CheckpointException as error:
            raise self._unfit(found, what_failed(error)) from None

    def _candidates(self, wanted: int | str, steps: Sequence[int]) -> list[int]:
        if wanted in ("latest", "last-good"):
            return list(steps)
        if wanted in steps:
            return [step for step in steps if step <= int(wanted)]
        there = ", ".join(map(str, steps)) or "none"
        raise SlipstreamError(
            f"there is no checkpoint {wanted!r} in {self._folder.path}; give one of its steps ({there}), latest or "
            "last-good"
        )

    def _verify(self, step: int) -> SavedCheckpoint | str:
        """The checkpoint, or what is wrong with it: the same on all ranks."""
        folder, problem, manifest = self._folder.whole(step), "", None
        try:
            manifest = Manifest.read(folder)
            for name in sorted(manifest.files)[self._world.rank :: self._world.size]:
                verify_file(folder / name, manifest.files[name])
        except DamagedError as error:
            problem = str(error)
        problems = dict.fromkeys(told for told in self._world.gather(problem) if told)
        if problems or manifest is None:
            return "; ".join(problems)
        return SavedCheckpoint(folder, manifest)

    def _judge(self, found: SavedCheckpoint | None, wanted: int | str, damage: Sequence[str]) -> SavedCheckpoint | None:
        if not damage:
            return found
        told = "; ".join(damage)
        if found is None:
            raise SlipstreamError(f"{told}. No good one is left before it; train from the beginning in another folder.")
        if wanted != "last-good":
            raise SlipstreamError(
                f"{told}. The last good one before it is of step {found.step}: give {found.step}, or last-good to take "
                "the newest good one whenever that happens."
            )
        self._say(f"{told}; taking that of step {found.step}")
        return found

    def _raise_alike(self, found: SavedCheckpoint, problem: str) -> None:
        problems = dict.fromkeys(told for told in self._world.gather(problem) if told)
        if problems:
            raise self._unfit(found, "; ".join(problems))

    def _unfit(self, found: SavedCheckpoint, problem: str) -> SlipstreamError:
        return SlipstreamError(
            f"{found.folder} can't be loaded: {problem}. Start with the settings it was saved with, or train in "
            "another folder."
        )

    def _retire(self) -> None:
        self._folder.retire(self._keep, self._keep_every)

    def _and_the_last_one(self, warning: str) -> str:
        steps: list[int] = self._on_first(self._folder.steps)
        return f"{warning}. " + (f"The last checkpoint is that of step {steps[0]}." if steps else "There is none yet.")

    def _on_first(self, act: Callable[[], Any]) -> Any:
        """What rank 0 gets from `act`, on all ranks."""
        return self._world.gather(act() if self._world.rank == 0 else None)[0]


def _try(act: Callable[[], object]) -> str:
    """What prevented it, or ""."""
    try:
        act()
    except OSError as error:
        return str(error)
    return ""
