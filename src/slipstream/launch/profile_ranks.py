"""Measures a profile with local ranks that have the memory settings, threads and links of a training run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cost import UNSHARED, Degrees, Profile, load_profile
from slipstream.errors import SlipstreamError
from slipstream.launch.forked_ranks import fork_server
from slipstream.launch.local_ranks import has_launcher, launch_ranks, reported_to_the_launcher, temporary_folder
from slipstream.launch.stop_request import watched_local_rank
from slipstream.watchdog import watchdog_paused

if TYPE_CHECKING:
    from slipstream.profile import ProfileSettings

_REQUEST, _MODEL, _PROFILE = "request.json", "model", "profile.json"


def measure_profile(
    model_config: Any, settings: ProfileSettings, num_ranks: int, device: str = "auto", degrees: Degrees = UNSHARED
) -> Profile:
    """Starts local processes that measure at the same time; returns their link and the times of the first.

    Args:
        model_config: a transformers.PretrainedConfig.
        settings: what is measured.
        num_ranks: the number of a pipeline's ranks that share this machine.
        device: "cpu", "cuda", or "auto": CUDA where there is a GPU, which processes may share.
        degrees: by how many processes the work of each of these ranks is shared.

    Raises:
        SlipstreamError: if the settings don't fit together, there is no such device, or the processes of a rank can't
            share the model's layers, its slices or its experts.
        RankFailedError: if a rank ended early.
    """
    import torch

    from slipstream.parallel import check_sharing

    # before anything below starts threads or looks for GPUs
    with fork_server() as server, temporary_folder() as folder:
        settings.check(model_config)
        check_sharing(model_config, degrees, settings.parallel)
        if has_launcher():
            raise SlipstreamError("slipstream profile starts its own processes; run it without torchrun or srun.")
        num_devices = torch.cuda.device_count()
        num_processes = num_ranks * degrees.num_ranks
        if device == "cuda" and not num_devices:
            raise SlipstreamError("--device=cuda needs a CUDA device, but there is none; use --device=cpu")
        chosen = ("cuda" if num_devices else "cpu") if device == "auto" else device
        model_config.save_pretrained(folder / _MODEL)
        request = {"settings": settings.to_json(), "device": chosen, "degrees": degrees}
        (folder / _REQUEST).write_text(json.dumps(request))
        launch_ranks("slipstream.launch.profile_ranks", [str(folder)], num_processes, server)
        return load_profile(folder / _PROFILE)


def _measure_as_rank(folder: Path) -> None:
    """Measures as one rank; the first rank shows progress and writes the profile."""
    import torch
    import torch.distributed as dist

    from slipstream.launch.progress import Progress
    from slipstream.model import load_config
    from slipstream.parallel import NO_LIMIT, Ranks, choose_backend, gpu_of, limit_of_the_environment, make_mesh
    from slipstream.profile import ProfileSettings, profile_model
    from slipstream.profile.link_measurement import measure_link
    from slipstream.terminal import make_console

    request = json.loads((folder / _REQUEST).read_text())
    device = torch.device("cpu")
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    if request["device"] == "cuda":
        device = gpu_of(int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = choose_backend("auto", device.type, num_local)
    limit = limit_of_the_environment()
    watched = watched_local_rank(limit, "SLIPSTREAM_STALL_LIMIT")
    with watched as connection, watchdog_paused("measuring what layers cost"):
        backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        dist.init_process_group(backends, timeout=NO_LIMIT, **connection)
        is_first = dist.get_rank() == 0
        settings = ProfileSettings.from_json(request["settings"])
        degrees = Degrees(*request["degrees"])
        pipeline = dist.get_world_size() // degrees.num_ranks
        sizes: dict[str, Any] = degrees.mesh
        ranks = Ranks.of(make_mesh(pp=pipeline, device_type=device.type, **sizes))
        progress = Progress(make_console() if is_first else None)
        with progress.waiting("measuring the link"):
            link = measure_link(device, ranks, settings.parallel.sequence_parallel)
        with progress.counting("measuring the layers", total=1) as show:
            config = load_config(str(folder / _MODEL))

            def grow(seconds: float) -> None:
                progress.say(
                    f"--budget={settings.budget:g} is too short for a fit of this model: measuring for about "
                    f"{seconds:.0f} s"
                )

            profile = profile_model(config, settings, device, link, show, ranks, grow)
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
