"""Finds the measured costs that runs have kept of a model on this machine."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.planner.costs import Profile, load_profile
from slipstream.profiler.cost_cache import cache_folder
from slipstream.profiler.profile_identity import identify_hardware, identify_model, versions


def newest_costs(config: PretrainedConfig, seq_len: int, dtype: str | None, num_processes: int | None) -> Profile:
    """Returns the newest kept profile of this model, measured here with the present software.

    Args:
        config: the model's config.
        seq_len: tokens of a sequence; the profile has times of as many at least.
        dtype: the profile's dtype. None: any.
        num_processes: how many processes measured at the same time. None: any number.

    Raises:
        SlipstreamError: where there is none: where it was looked for, and how to measure one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, here = identify_model(config), identify_hardware(device, num_processes or 1)

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
            and num_processes in (None, there.processes)
        )

    files = sorted(cache_folder().glob(f"{config.model_type}-*.json"), key=lambda path: -path.stat().st_mtime)
    for path in files:
        try:
            profile = load_profile(path)
        except SlipstreamError:  # of another version
            continue
        if suits(profile):
            return profile
    raise SlipstreamError(
        f"no cluster is given, and {cache_folder()} has no costs of this model in sequences of {seq_len} tokens that "
        "were measured on this machine with the installed versions. Measure them with `slipstream profile MODEL "
        f"--seq-len={seq_len} --ranks={num_processes or 2} --output=profile.json` and plan with profile.json, or name "
        "a cluster such as h100-dgx."
    )
