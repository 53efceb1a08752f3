"""The checkpoints of a run: saved in the background, found again, and loaded by any mesh of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slipstream.checkpoint.background_save import BackgroundSave, Snapshot, describe_error
from slipstream.checkpoint.files import DamagedError, describe_non_finite, find_non_finite, verify_file
from slipstream.checkpoint.folder import CheckpointFolder, require_best
from slipstream.checkpoint.manifest import MANIFEST, Manifest, TensorShard
from slipstream.checkpoint.saved_checkpoint import SavedCheckpoint
from slipstream.errors import NonFiniteError, SlipstreamError
from slipstream.parallel import RankGroup


class Checkpoints:
    """The checkpoints in one folder, on a disk that all ranks share.

    A save is written while training continues. Before the optimizer's next update, call `keep`: it copies the tensors
    that aren't written by then to host memory, which takes up to as much memory as all the shards that this rank
    writes. A save that fails is reported by the next `save`, `wait` or `close`; earlier checkpoints stay as they are.
    Where it failed as something isn't finite, these raise NonFiniteError: no training can go on from there. After an
    exception, when not all ranks come to `close`, leave it out: the threads end with the process, and their files
    aren't taken for a checkpoint.

    Every method is collective over `world`, unless it says otherwise.

    Args:
        folder: where the checkpoints are.
        world: all processes.
        keep: how many of the newest checkpoints are not removed, at least 1; the best one doesn't count.
        keep_every: checkpoints whose step it divides are not removed either; 0 for none.
        say: gets a line of text, the same on every rank, about a problem that doesn't end the run.
        saved: gets, on rank 0, the step of a checkpoint that is complete, the seconds that writing it took, and its
            bytes.
        saving_group: carries the messages of a save, if it isn't used meanwhile, such as `world` where
            each save is waited for; default: one of its own.
        work: a folder on the same disk, in which a checkpoint is written before it gets its name; default: `folder`.
            Nothing is published, set aside or removed any more once somebody has moved it away.
    """

    def __init__(
        self,
        folder: Path,
        world: RankGroup,
        keep: int = 2,
        keep_every: int = 0,
        say: Callable[[str], None] = print,
        saved: Callable[[int, float, int], None] = lambda *_: None,
        saving_group: RankGroup | None = None,
        work: Path | None = None,
    ) -> None:
        self._saved = saved
        self._folder = CheckpointFolder(folder, keep, keep_every, work)
        self._world = world
        self._say = say
        self._snapshot = Snapshot()
        self._save: BackgroundSave | None = None
        # Messages about a save must not mix with those of training.
        if saving_group is None:
            alone = world.size == 1
            saving_group = world if alone else RankGroup(dist.new_group(world.global_ranks, backend="gloo"))
        self._saving_group = saving_group

    def prepare(self) -> None:
        """Makes the folder and removes the remains of an interrupted save. Call it before training.

        Raises:
            SlipstreamError: if the folder can't be written.
        """
        if problem := self._try_on_first(self._folder.prepare):
            where = f"no checkpoints can be written to {self._folder.path}"
            raise SlipstreamError(f"{where}: {problem}. Choose another folder.")

    def save(self, step: int, shards: Sequence[TensorShard], facts: Mapping[str, Any]) -> None:
        """Begins to save the shards as they are now, and returns; waits first for the save before.

        The shards must not change until `keep`, `wait` or `close` has returned: otherwise the save fails. Each element
        of each tensor must be written by exactly one rank; if several ranks write one, the save fails.

        Args:
            step: the step of training after which it is saved.
            shards: this rank's parts of the tensors.
            facts: anything that JSON can hold; those of rank 0 are saved.

        Raises:
            ValueError: if two shards of this rank have the same element.
        """
        self.wait()
        kept_facts = json.loads(json.dumps(facts))
        if problem := self._try_on_first(lambda: self._folder.begin(step)):
            self._warn(f"the checkpoint of step {step} was not saved: {problem}")
            return
        self._snapshot.take(shards, f"rank-{self._world.rank:05d}.safetensors")
        self._save = BackgroundSave(self._folder, step, kept_facts, self._snapshot, self._saving_group)

    def keep(self) -> None:
        """Lets the shards of the last save change from now on. Not collective."""
        self._snapshot.keep()

    def wait(self) -> None:
        """Waits until the checkpoint that is being saved is complete, or has failed and that has been said."""
        save, self._save = self._save, None
        if save is None:
            return
        if problem := self._world.gather(save.finish())[0]:
            self._try_on_first(lambda: self._folder.discard(save.step))
            if isinstance(problem, NonFiniteError):
                raise problem
            self._warn(problem)
        elif self._world.rank == 0:
            self._saved(save.step, save.seconds, save.num_bytes)

    def close(self) -> None:
        """Waits at the end of training, and releases the memory."""
        self.wait()
        self._snapshot = Snapshot()

    def newest_bytes(self) -> int:
        """Returns the size of the newest complete checkpoint, 0 where there is none."""
        steps = self._steps()
        return self._world.run_on_leader(lambda: self._folder.size(steps[0]) if steps else 0)

    def saved_text(self, step: int) -> str:
        """Returns whether the checkpoint of a step is there, as the end of a sentence, and how to go on from it."""
        if step not in self._steps():
            return f"its checkpoint could not be saved in {self._folder.path}"
        return f"it is saved in {self._folder.complete(step)}: go on from there with --checkpoint.resume=latest"

    def find(
        self, wanted: int | Literal["latest", "last-good", "best"] = "latest", before: int | None = None
    ) -> SavedCheckpoint | None:
        """Returns the checkpoint of a step, or the newest one, verified; None where there is none yet.

        Every byte of every file is verified, each file by one of the ranks, and that all elements are finite.
        "last-good" passes over damaged checkpoints, and those that only another version reads, and says so. "best" is
        that of the lowest validation loss in a run that keeps it. `before`: takes those of earlier steps only.

        Raises:
            SlipstreamError: if the checkpoint is damaged: names the file that is missing, truncated or altered, and the
                newest good checkpoint before it.
        """
        damage: list[str] = []
        saved = None
        for step in self._candidates(wanted):
            if before is not None and step >= before:
                continue
            saved, problems = self._verify(step)
            if saved is not None:
                break
            damage.append(f"the checkpoint of step {step} in {self._folder.path} {problems}")
        if not damage:
            return saved
        what = "; ".join(damage)
        if saved is None:
            instead = "take latest" if wanted == "best" else "train from the beginning in another folder"
            raise SlipstreamError(f"{what}. No good one is left before it; {instead}.")
        if wanted != "last-good":
            raise SlipstreamError(
                f"{what}. The last good one before it is of step {saved.step}: give {saved.step}, or last-good to "
                "take the newest good one whenever that happens."
            )
        self._say(f"{what}; taking that of step {saved.step}")
        return saved

    def load(self, saved: SavedCheckpoint, shards: Sequence[TensorShard], problem: str = "") -> None:
        """Fills the tensors of the shards in place, whatever mesh saved them; `writes` makes no difference.

        Args:
            saved: from `find`.
            shards: this rank's parts of the tensors.
            problem: why this rank can't use the checkpoint, which all ranks are then told; "" where it can.

        Raises:
            SlipstreamError: on all ranks and before any tensor is changed, if a tensor isn't in the checkpoint, or has
                another shape or dtype there, or a rank has a problem.
        """
        if misfits := self._gather_problems(problem or saved.describe_misfits(shards)):
            raise saved.unfit(f"can't be loaded: {misfits}")
        try:
            saved.load(shards, self._world)
        except CheckpointException as error:
            failures = [f"rank {rank}: {describe_error(cause)}" for rank, (cause, _) in sorted(error.failures.items())]
            raise saved.unfit(f"can't be loaded: {'; '.join(failures)}") from None

    def _candidates(self, wanted: int | str) -> list[int]:
        """Returns the step that is wanted and all earlier ones, the newest first."""
        steps = self._steps()
        if wanted in ("latest", "last-good") or (wanted == "best" and not steps):
            return steps
        if wanted == "best":
            wanted = self._world.run_on_leader(lambda: require_best(self._folder).step)
        if wanted in steps:
            return [step for step in steps if step <= int(wanted)]
        there = ", ".join(map(str, steps)) or "none"
        raise SlipstreamError(
            f"there is no checkpoint {wanted!r} in {self._folder.path}; give one of its steps ({there}), latest or "
            "last-good"
        )

    def _verify(self, step: int) -> tuple[SavedCheckpoint | None, str]:
        """Returns the checkpoint, or None and its problem: the same on all ranks."""
        folder = self._folder.complete(step)
        problem = ""
        saved = None
        what = DamagedError.what
        try:
            saved = SavedCheckpoint(folder, Manifest.read(folder))
            if saved.step != step:
                raise DamagedError(
                    f"{MANIFEST} is of step {saved.step}: the folder was renamed or copied; rename it to "
                    f"{self._folder.complete(saved.step).name}"
                )
            for name in sorted(saved.manifest.files)[self._world.rank :: self._world.size]:
                verify_file(folder / name, saved.manifest.files[name])
                if (poisoned := find_non_finite(folder / name)) is not None:
                    raise DamagedError(f"in {name}, {describe_non_finite(poisoned)}")
        except DamagedError as error:
            problem = str(error)
            what = error.what
        problems = self._gather_problems(problem)
        return (None, f"{what}: {problems}") if problems else (saved, "")

    def _gather_problems(self, problem: str) -> str:
        return "; ".join(dict.fromkeys(text for text in self._world.gather(problem) if text))

    def _warn(self, warning: str) -> None:
        steps = self._steps()
        last = f"The last checkpoint is that of step {steps[0]}." if steps else "There is none yet."
        self._say(f"{warning}. {last}")

    def _steps(self) -> list[int]:
        return self._world.run_on_leader(self._folder.steps)

    def _try_on_first(self, act: Callable[[], object]) -> str:
        """Lets rank 0 act, and returns on all ranks the problem that prevented it, or ""."""
        try:
            self._world.run_on_leader(act)
        except OSError as error:
            return str(error)
        return ""
