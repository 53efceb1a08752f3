"""Checks that a run could go on with fewer processes."""

from __future__ import annotations

from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import has_launcher
from slipstream.train.config import Config
from slipstream.train.elastic_mesh import mesh_of_processes
from slipstream.train.preflight.host_check import check_hosts
from slipstream.train.preflight.memory_check import check_memory, memory_account
from slipstream.units import bytes_text


def check_smaller_meshes(config: Config, model_config: Any) -> None:
    """Checks that the run could go on with any number of processes down to `training.min_ranks`.

    Raises:
        SlipstreamError: with the smallest number that would do.
    """
    least = config.training.min_ranks
    smallest = config.num_processes
    if least is None:
        return
    if least > config.num_processes and not has_launcher():
        raise SlipstreamError(
            f"training.min_ranks={least} is more than the {config.num_processes} processes of {config.mesh_text}; give "
            f"--training.min_ranks={config.num_processes} or less"
        )
    checked = {config.mesh_text}
    for count in range(config.num_processes - 1, least - 1, -1):
        try:
            mesh = mesh_of_processes(config, count)
            if mesh.mesh_text not in checked:
                checked.add(mesh.mesh_text)
                _check_as_smaller(mesh, config, model_config)
        except SlipstreamError as error:
            raise SlipstreamError(
                f"training.min_ranks={least}, but with {count} of {config.num_processes} processes the run couldn't "
                f"go on: {error}. The smallest number that would do is {smallest}: give --training.min_ranks={smallest}"
            ) from None
        smallest = count


def _check_as_smaller(mesh: Config, config: Config, model_config: Any) -> None:
    """Raises SlipstreamError where a run of the configuration couldn't go on with a smaller mesh."""
    check_memory(mesh, model_config)
    check_hosts(mesh, model_config)
    rows = config.training.batch_size
    replicas = mesh.parallel.data
    divides = config.data.packing == "fixed" and rows % (replicas * mesh.pipeline.num_microbatches) == 0
    if config.pipeline.router_loss != "none" and not divides:
        raise SlipstreamError(
            f"pipeline.router_loss={config.pipeline.router_loss} depends on the microbatches, which would be others: a "
            f"batch doesn't divide into {mesh.pipeline.num_microbatches} equal ones for each of {replicas} replicas"
        )
    limit = config.memory.limit
    if limit is None or (account := memory_account(mesh, model_config)) is None or (held := account()) <= limit:
        return
    raise SlipstreamError(
        f"by the planner's account the fullest rank of {mesh.mesh_text} would hold {bytes_text(held)}, and "
        f"memory.limit={limit:.6g} ({bytes_text(limit)})"
    )
