"""Measures a profile with local ranks that have the memory settings, threads and links of a training run."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch.local_ranks import has_launcher, launch_ranks, reported_to_the_launcher
from slipstream.planner.costs import Profile, load_profile

_REQUEST, _MODEL, _PROFILE = "request.json", "model", "profile.json"


def measure_profile(model_config: Any, settings: dict[str, Any], num_ranks: int, device: str = "auto") -> Profile:
    """Starts `num_ranks` local ranks that measure at the same time; returns their link and the times of the first.

    Args:
        model_config: a transformers.PretrainedConfig.
        settings: the arguments of ProfileSettings.
        num_ranks: the number of a pipeline's ranks that share this machine.
        device: "cpu", "cuda", or "auto": CUDA where there is a device for each rank.

    Raises:
        SlipstreamError: if the settings don't fit together or there are too few devices.
        RankFailedError: if a rank ended early.
    """
    import torch

    from slipstream.profiler import ProfileSettings

    ProfileSettings(**settings).check()
    if has_launcher():
        raise SlipstreamError("slipstream profile starts its own processes; run it without torchrun or srun.")
    num_devices = torch.cuda.device_count()
    if device == "cuda" and num_devices < num_ranks:
        raise SlipstreamError(
            f"--device=cuda with --ranks={num_ranks} needs as many CUDA devices, but there are {num_devices}; "
            f"use --device=cpu{f' or --ranks={num_devices}' if num_devices else ''}"
        )
    chosen = ("cuda" if num_devices >= num_ranks else "cpu") if device == "auto" else device
    with tempfile.TemporaryDirectory(prefix="slipstream-profile-") as name:
        folder = Path(name)
        model_config.save_pretrained(folder / _MODEL)
        (folder / _REQUEST).write_text(json.dumps({"settings": settings, "device": chosen}))
        launch_ranks(["-m", "slipstream.launch.profile_ranks", name], num_ranks)
        return load_profile(folder / _PROFILE)


def _measure_as_rank(folder: Path) -> None:
    """Measures as one rank; the first rank shows progress and writes the profile."""
    import torch
    import torch.distributed as dist

    from slipstream.launch.progress import Progress, make_console
    from slipstream.model import load_config
    from slipstream.profiler import ProfileSettings, profile_model
    from slipstream.profiler.link_measurement import measure_link

    request = json.loads((folder / _REQUEST).read_text())
    device, backend = torch.device("cpu"), "gloo"
    if request["device"] == "cuda":
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    is_first = dist.get_rank() == 0
    progress = Progress(make_console() if is_first else None)
    with progress.waiting("measuring the link"):
        link = measure_link(device)
    with progress.counting("measuring the layers", total=1) as show:
        config = load_config(str(folder / _MODEL))
        profile = profile_model(config, ProfileSettings(**request["settings"]), device, link, show)
    if is_first:
        profile.save(folder / _PROFILE)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measures as one of the ranks that `measure_profile` launches."""
    with reported_to_the_launcher():
        _measure_as_rank(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
