"""Finds the measured costs that runs have kept of a model on this machine."""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.planner.costs import Profile, load_profile
from slipstream.profiler.cost_cache import cache_folder
from slipstream.profiler.profile_identity import identify_hardware, identify_model, versions


def newest_costs(
    config: PretrainedConfig,
    seq_len: int,
    dtype: str | None = None,
    num_ranks: int | None = None,
    tensor_parallel: Collection[int] | None = None,
) -> Profile:
    """Returns the newest kept profile of this model, measured here with the present software.

    Those of ranks that shared tokens too, or layers otherwise than the model says, are passed over.

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
            and num_ranks in (None, there.processes // profile.tensor_parallel)
            and (tensor_parallel is None or profile.tensor_parallel in tensor_parallel)
            and not (profile.sequence_parallel or profile.tensor_plan)
        )

    files = sorted(cache_folder().glob(f"{config.model_type}-*.json"), key=lambda path: -path.stat().st_mtime)
    for path in files:
        try:
            profile = load_profile(path)
        except SlipstreamError:  # of another version
            continue
        if suits(profile):
            return profile
    wanted = (1,) if tensor_parallel is None else tensor_parallel
    raise SlipstreamError(
        f"no cluster is given, and {cache_folder()} has no costs of this model in sequences of {seq_len} tokens that "
        f"were measured on this machine with the installed versions. {_how_to_measure(seq_len, num_ranks, wanted)}, or "
        "name a cluster such as h100-dgx."
    )


def _how_to_measure(seq_len: int, num_ranks: int | None, tensor_parallel: Collection[int]) -> str:
    shared = "" if 1 in tensor_parallel else f"--tp={min(tensor_parallel)} "
    return (
        f"Measure them with `slipstream profile MODEL --seq-len={seq_len} --ranks={num_ranks or 2} {shared}"
        "--output=profile.json` and plan with profile.json"
    )
