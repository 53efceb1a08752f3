"""The mesh of a run whose configuration leaves it open: the one whose best plan takes least time, by measured costs.

Each way to lay the ranks on the open axes that the model, the batch and the optimizer allow is planned from the costs
that a run measures before its first step, which meshes with as many tensor ranks have in common. The work after the
last backward is added: sums of gradients over replicas, and the optimizer. Meshes that need more than a device's memory
are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from slipstream.cost import MeasuredCosts, Profile
from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks
from slipstream.pipeline import PipelineOptions, held_bytes, profile_of, seconds_after
from slipstream.planning.plan_file import rounded
from slipstream.train.config import Config, dump_config
from slipstream.train.configured_pipeline import make_mesh_of
from slipstream.train.device_choice import memory_of_a_rank
from slipstream.train.preflight import first_mesh, possible_meshes
from slipstream.train.recorded_plan import expected_batch
from slipstream.train.run_context import RunContext
from slipstream.units import bytes_text, seconds_text, table_text

_EFFORT = 0.2  # the share of the effort of a run's own search
_REDUCTIONS = 4  # all-reduces of a layer's output in a forward and a backward
_ALIKE = 1.02  # times the shortest planned step: plans are off by as much


@dataclass(frozen=True)
class PlannedMesh:
    """The seconds and bytes of a mesh's best plan.

    Args:
        config: with the mesh.
        seconds: of a step, the sums of gradients and the optimizer included; infinite where nothing can be planned.
        ideal: the work of a step divided by the ranks, and the seconds after it.
        held: bytes of the fullest rank.
        obstacle: why it isn't taken; "" where it may be.
        profile: the costs by which it was planned.
    """

    config: Config
    seconds: float = inf
    ideal: float = 0.0
    held: float = 0.0
    obstacle: str = ""
    profile: Profile | None = None

    def least_seconds(self, config: Config) -> float:
        """Returns the least seconds of a mesh whose tensor ranks share this one's work in equal parts, by the link's
        bandwidth: 0 where it isn't known."""
        if self.profile is None or self.profile.link is None:
            return 0.0
        tensor = config.parallel.tensor
        pipeline = config.pipeline
        training = config.training
        rows = training.batch_size / config.parallel.data / self.profile.microbatch_size
        own = MeasuredCosts(replace(self.profile, degrees=config.parallel.degrees)).message_bytes(training.seq_len)
        sent = float(own) * 2 * (tensor - 1) / tensor
        reductions = _REDUCTIONS * rows * len(self.profile.kinds) / pipeline.num_ranks
        return self.ideal + reductions * sent / self.profile.link.ring_bandwidth

    def row(self) -> tuple[str, str, str, str]:
        took = (seconds_text(self.seconds), bytes_text(self.held)) if self.seconds < inf else ("", "")
        return self.config.mesh_text, *took, self.obstacle


def choose_mesh(run: RunContext) -> None:
    """Gives the run's configuration the best mesh, and writes it to the run's folder. Collective.

    Raises SlipstreamError where nothing fits the memory of the devices.
    """
    config = run.config
    world = run.world
    progress = run.progress
    if not config.plan.open:
        return
    model_config = run.source.config
    first: Config = world.run_on_leader(lambda: first_mesh(config, model_config))
    if not first.plan.open:
        run.config = first
        return
    tried: list[PlannedMesh] = []
    for option in world.run_on_leader(lambda: [*possible_meshes(config, model_config)]):
        best = min((mesh for mesh in tried if not mesh.obstacle), key=lambda mesh: mesh.seconds, default=None)
        if best and option.parallel.tensor > best.config.parallel.tensor and best.least_seconds(option) >= best.seconds:
            tried.append(PlannedMesh(option, obstacle=f"at least {seconds_text(best.least_seconds(option))}"))
        else:
            tried.append(_planned(run, option))
    fitting = sorted((mesh for mesh in tried if not mesh.obstacle), key=lambda mesh: mesh.seconds)
    if not fitting:
        least = min(tried, key=lambda mesh: mesh.held or inf)
        raise SlipstreamError(
            f"no mesh of {config.num_processes} ranks has a plan that fits: {least.config.mesh_text}: {least.obstacle}"
        )
    fitting.insert(0, fitting.pop(preferred([(mesh.seconds, mesh.config.pipeline.num_ranks) for mesh in fitting])))
    progress.say(mesh_table([*fitting, *(mesh for mesh in tried if mesh.obstacle)]))
    meshes = {mesh.config.mesh_text: rounded(mesh.seconds) for mesh in tried if mesh.seconds < inf}
    plan = config.plan.model_copy(update={"open": [], "predicted": {"meshes": meshes}})
    chosen = fitting[0].config.model_copy(update={"plan": plan})
    if world.rank == 0:
        with run.folder.replaced(run.folder.config) as part:
            part.write_text(dump_config(chosen), encoding="utf-8")
    run.config = chosen


def preferred(steps: Sequence[tuple[float, int]]) -> int:
    """Returns which mesh is taken, given the planned seconds and the pipeline ranks of each: of those whose steps are
    as short as the shortest within 2%, the one with the fewest ranks, which wait for each other least."""
    shortest = min(steps)[0]
    alike = [(ranks, seconds, place) for place, (seconds, ranks) in enumerate(steps) if seconds <= _ALIKE * shortest]
    return min(alike)[-1]


def mesh_table(meshes: Sequence[PlannedMesh]) -> str:
    """Returns one line per mesh, the chosen one first."""
    return table_text([("mesh", "step", "fullest rank", ""), *(mesh.row() for mesh in meshes)])


def _planned(run: RunContext, config: Config) -> PlannedMesh:
    """Returns the best plan of the run with another mesh, from costs that are measured here unless they are known.
    Collective."""
    progress = run.progress
    device = run.device
    progress.say(f"planning {config.mesh_text}")
    ranks = Ranks.of(make_mesh_of(config, device))
    expected = replace(expected_batch(config, run.sequences, progress), effort=_EFFORT)
    options = PipelineOptions(**config.pipeline_options() | {"seq_len": expected, "device": device})
    options = replace(options, runtime=config.runtime.model_copy(update={"self_check": False}))
    try:
        family = run.family_on(options, ranks)
        request = family.start_request(config.pipeline.num_ranks, expected)
        plan, _ = family.plan(config.pipeline.num_ranks, progress.say)
    except SlipstreamError as error:
        return PlannedMesh(config, obstacle=str(error))
    copies = ranks.copies.size
    after = seconds_after(plan, copies, copies if config.parallel.shard != "none" else 1)
    held = held_bytes(plan, request)
    room = memory_of_a_rank(config)
    obstacle = f"{bytes_text(held - room)} more than the {bytes_text(room)} of a rank" if held > room else ""
    return PlannedMesh(config, plan.seconds + after, plan.ideal, held, obstacle, profile_of(plan))
