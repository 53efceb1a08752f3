"""Profiles of earlier runs, kept so that a second start of the same model on the same hardware measures nothing.

They lie in `$XDG_CACHE_HOME/slipstream/costs`, by default in `~/.cache/slipstream/costs`, a file for each model, dtype,
hardware, number of processes, degrees by which a stage's work is shared, and settings. Deleting them is safe.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from slipstream.atomic_files import cache_folder, replaced_file
from slipstream.cost import UNSHARED, Degrees, MeasuredLink, Profile, load_profile
from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks
from slipstream.profile.link_measurement import measure_link
from slipstream.profile.measurement_run import TooLittleTimeError
from slipstream.profile.profile_run import ProfileSettings, identify_hardware, identify_model, profile_model, versions

_ATTEMPTS = 2
# Share of the budget that must be left for a second attempt; with less it would be too coarse.
_LEAST_LEFT = 0.5
# Measuring gets at least this share of the budget, however long the link before it has taken.
_LEAST_SHARE = 0.1
_SHARED = "SLIPSTREAM_SHARED_CORES"
# Samples on shared cores may never agree, so there are at most this many rounds.
_ROUNDS_OF_SHARED = 3
_ALWAYS = f"Where others always use them, set {_SHARED}=1: then costs are measured once, in few rounds, and kept"
_UNMEASURED = (
    f"set {_SHARED}=1 where other programs always use the cores, or give pipeline.schedule=1f1b (schedule='1f1b' of a "
    "Pipeline), for which nothing is measured"
)
# The profiles that this process has measured and doesn't keep: meshes are compared, and the best one planned, by one.
_disturbed: dict[Path, Profile] = {}


def costs_folder() -> Path:
    """Returns the folder of the kept profiles, which need not exist."""
    return cache_folder() / "costs"


@dataclass(frozen=True)
class CostCache:
    """The kept profile of one model with these settings on this hardware."""

    config: PretrainedConfig
    settings: ProfileSettings
    device: torch.device
    num_processes: int
    degrees: Degrees = UNSHARED  # ranks that share a stage's work, by kind

    @classmethod
    def of(cls, config: PretrainedConfig, settings: ProfileSettings, device: torch.device, ranks: Ranks) -> CostCache:
        """Returns the key of a mesh, all of whose ranks measure at the same time."""
        return cls(config, settings, device, ranks.world.size, ranks.degrees)

    @property
    def path(self) -> Path:
        """The file of the profile."""
        hardware = identify_hardware(self.device, self.num_processes)
        key = [asdict(identify_model(self.config)), asdict(hardware), self.settings.to_json(), self.degrees]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return costs_folder() / f"{self.config.model_type}-{digest[:16]}.json"

    def find(self, say: Callable[[str], None]) -> Profile | None:
        """Returns the profile; None, after saying why, where it is unreadable or was measured with other versions."""
        if not self.path.exists():
            return None
        try:
            profile = load_profile(self.path)
        except SlipstreamError as error:
            say(f"costs are measured again: {error}")
            return None
        here = versions()
        if changed := [f"{name} {old}" for name, old in profile.versions.items() if here.get(name) != old]:
            say(f"costs are measured again: those in {self.path} are from {', '.join(changed)}")
            return None
        return profile

    def keep(self, profile: Profile, say: Callable[[str], None]) -> None:
        """Writes the profile, whole or not at all."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replaced_file(self.path) as part:
                profile.save(part)
        except OSError as error:
            say(f"the measured costs can't be kept in {self.path.parent}: {error.strerror}")


def find_costs(
    config: PretrainedConfig,
    settings: ProfileSettings,
    device: torch.device,
    ranks: Ranks,
    say: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[float], None] = lambda share: None,
    link: MeasuredLink | None = None,
) -> Profile:
    """Returns the kept profile, or measures one on all ranks at the same time and keeps it. Collective.

    `say` gets a line, on the leader, where something is measured again: a profile of other versions, or one during
    which another program used the cores. A profile that was disturbed twice, or once with little of the budget left, is
    used but not kept. Where ranks share their cores all the time, it is measured once, in few rounds, and kept.
    `on_progress` is called, on the leader, with the share of the settings' budget that is spent. `link` has the times
    of messages between these ranks, if they were measured.

    Raises SlipstreamError where the budget, which is that of all attempts together, doesn't do for one.
    """
    cache = CostCache.of(config, settings, device, ranks)
    cached: Profile | None = ranks.run_on_leader(lambda: _disturbed.get(cache.path) or cache.find(say))
    has_link = cached is not None and cached.link is not None and (cached.link.points or ranks.pipeline.size == 1)
    if cached is not None and (has_link or ranks.world.size == 1):
        return cached
    began, spent = time.perf_counter(), 0.0  # the share of the budget

    def tell(share: float) -> None:
        if ranks.leads:
            on_progress(min(1.0, spent + (1 - spent) * share))

    def share_spent() -> float:
        return float(ranks.broadcast(min(1.0, (time.perf_counter() - began) / settings.budget)))

    profiles: list[Profile] = []
    share_cores: bool = ranks.run_on_leader(lambda: _share_cores(ranks))
    if share_cores:
        settings = replace(settings, repeats=min(settings.repeats, _ROUNDS_OF_SHARED))
    for attempt in range(_ATTEMPTS):
        is_kept = link and not attempt
        apart = settings.parallel.sequence_parallel
        between = link if is_kept else measure_link(device, ranks, apart, few_repeats=share_cores)
        spent = share_spent()  # share spent, the link included
        left = replace(settings, budget=max(_LEAST_SHARE, 1 - spent) * settings.budget)
        try:
            profiles.append(_leaders(profile_model(config, left, device, between, tell, ranks), ranks))
        except TooLittleTimeError as error:
            if not profiles:
                raise SlipstreamError(f"{error} in {settings.budget:g} s; {_UNMEASURED}") from error
            break
        if share_cores or not profiles[-1].is_disturbed:
            break
        spent = share_spent()
        last = attempt == _ATTEMPTS - 1 or 1 - spent < _LEAST_LEFT
        if ranks.leads:
            next_step = "the costs are used, but not kept" if last else "measuring again"
            share = f"{profiles[-1].disturbed:.0%} of the measuring"
            say(f"another program used the cores for {share}: {next_step}. {_ALWAYS}")
        if last:
            break
    best = min(profiles, key=lambda profile: profile.disturbed)
    if ranks.leads and best.is_disturbed and not share_cores:
        _disturbed[cache.path] = best
    elif ranks.leads:
        cache.keep(best, say)
    return best


def _share_cores(ranks: Ranks) -> bool:
    """Returns whether a measuring is always disturbed here: this host has more ranks than cores, or other programs use
    them too, as the environment says."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world.size))
    return num_local > (os.cpu_count() or 1) or _SHARED in os.environ


def _leaders(mine: Profile, ranks: Ranks) -> Profile:
    """Returns the leader's profile, with the largest disturbance of any rank."""
    disturbed = max(ranks.world.gather(mine.disturbed))
    leader: Profile = ranks.broadcast(mine)
    return replace(leader, disturbed=disturbed)


def newest_costs(
    config: PretrainedConfig,
    seq_len: int,
    dtype: str | None = None,
    num_ranks: int | None = None,
    tensor_parallel: Collection[int] | None = None,
) -> Profile:
    """Returns the newest kept profile of this model, measured here with the present software.

    Those of ranks that shared tokens or experts too, or layers otherwise than the model says, are passed over.

    Args:
        config: the model's config.
        seq_len: tokens of a sequence; the profile has times of as many at least.
        dtype: the profile's dtype. None: any.
        num_ranks: how many ranks the pipelines had that measured at the same time. None: any number.
        tensor_parallel: over how many ranks layers may have been spread. None: any number.

    Raises:
        SlipstreamError: where there is none: where it was looked for, and how to measure one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, here = identify_model(config), identify_hardware(device)

    def suits(profile: Profile) -> bool:
        there = profile.hardware
        same_machine = (there.device, there.cpu, there.cores) == (here.device, here.cpu, here.cores)
        same_software = profile.versions == versions()
        return (
            profile.model == model
            and same_machine
            and same_software
            and profile.seq_len >= seq_len
            and dtype in (None, profile.dtype)
            and num_ranks in (None, there.processes // profile.degrees.tensor)
            and (tensor_parallel is None or profile.degrees.tensor in tensor_parallel)
            and profile.degrees.num_ranks == profile.degrees.tensor
            and not (profile.sequence_parallel or profile.tensor_plan)
        )

    files = sorted(costs_folder().glob(f"{config.model_type}-*.json"), key=lambda path: -path.stat().st_mtime)
    for path in files:
        try:
            profile = load_profile(path)
        # The profile is of another version.
        except SlipstreamError:
            continue
        if suits(profile):
            return profile
    wanted = (1,) if tensor_parallel is None else tensor_parallel
    raise SlipstreamError(
        f"no cluster is given, and {costs_folder()} has no costs of this model in sequences of {seq_len} tokens that "
        f"were measured on this machine with the installed versions. {_how_to_measure(seq_len, num_ranks, wanted)}, or "
        "name a cluster such as h100-dgx."
    )


def _how_to_measure(seq_len: int, num_ranks: int | None, tensor_parallel: Collection[int]) -> str:
    shared = "" if 1 in tensor_parallel else f"--tp={min(tensor_parallel)} "
    return (
        f"Measure them with `slipstream profile MODEL --seq-len={seq_len} --ranks={num_ranks or 2} {shared}"
        "--output=profile.json` and plan with profile.json"
    )
