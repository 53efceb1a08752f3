"""The mesh of a run whose configuration leaves it open: the one whose best plan takes least time, by measured costs.

Each way to lay the ranks on the open axes that the model, the batch and the optimizer allow is planned from the costs
that a run measures before its first step, which meshes with as many tensor ranks have in common. Meshes whose plans
need more than a device's memory are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from slipstream.cluster_plans.plan_file import rounded
from slipstream.cost import MeasuredCosts, profile_behind
from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks
from slipstream.pipeline import PipelineOptions
from slipstream.planner.search import Evaluation
from slipstream.train.config import Config, dump_config
from slipstream.train.configured_pipeline import make_mesh_of
from slipstream.train.device_choice import memory_of_a_rank
from slipstream.train.preflight import first_mesh, possible_meshes
from slipstream.train.recorded_plan import expected_batch
from slipstream.train.run_context import RunContext
from slipstream.units import bytes_text, seconds_text, table_text

_EFFORT = 0.2  # share of the effort of a run's own search
_REDUCTIONS = 4  # all-reduces of a layer's output in a forward and a backward
_ALIKE = 1.02  # multiple of the shortest planned step that counts as equal, as plans are no more exact
_ON_HOST = "its host"
_COLUMNS = "mesh", "step", "fullest rank", _ON_HOST, ""


@dataclass(frozen=True)
class TriedMesh:
    """A mesh with the best plan on it.

    Args:
        config: the configuration with the mesh.
        step: the plan's step. None: nothing was planned.
        ideal: seconds of the step's work, divided by the ranks.
        obstacle: why the mesh isn't taken; "" where it may be.
    """

    config: Config
    step: Evaluation | None = None
    ideal: float = 0.0
    obstacle: str = ""

    @property
    def seconds(self) -> float:
        """The seconds of the step, optimizer included; infinite where nothing was planned."""
        return inf if self.step is None else self.step.seconds

    @property
    def held(self) -> float:
        """The bytes of the fullest rank; infinite where nothing was planned."""
        return inf if self.step is None else max(self.step.peaks())

    @property
    def on_host(self) -> float:
        """The most bytes of a rank on its host."""
        return 0.0 if self.step is None else max(self.step.host_peaks())

    def least_seconds(self, config: Config) -> float:
        """Returns the least seconds of a mesh whose tensor ranks share this one's work in equal parts, by the link's
        bandwidth: 0 where it isn't known."""
        if self.step is None:
            return 0.0
        profile = profile_behind(self.step.cut.costs)
        if profile.link is None:
            return 0.0
        tensor = config.parallel.tensor
        training = config.training
        rows = training.batch_size / config.parallel.data / profile.microbatch_size
        own = MeasuredCosts(replace(profile, degrees=config.parallel.degrees)).message_bytes(training.seq_len)
        sent = float(own) * 2 * (tensor - 1) / tensor
        reductions = _REDUCTIONS * rows * len(profile.kinds) / config.pipeline.num_ranks
        return self.ideal + reductions * sent / profile.link.ring_bandwidth

    def row(self) -> dict[str, str]:
        """The cells of the table of meshes, by their headings."""
        took = ("", "", "")
        if self.step is not None:
            took = (seconds_text(self.seconds), bytes_text(self.held), bytes_text(self.on_host))
        return dict(zip(_COLUMNS, (self.config.mesh_text, *took, self.obstacle), strict=True))


def choose_mesh(run: RunContext) -> None:
    """Gives the run's configuration the best mesh, and writes it to the run's folder. Collective.

    Raises SlipstreamError where nothing fits the memory of the devices.
    """
    config = run.config
    world = run.world
    if not config.plan.open:
        return
    model_config = run.source.config
    first: Config = world.run_on_leader(lambda: first_mesh(config, model_config))
    if not first.plan.open:
        run.config = first
        return
    tried: list[TriedMesh] = []
    for option in world.run_on_leader(lambda: [*possible_meshes(config, model_config)]):
        # Ranks on other machines may come to other last digits, so the leader decides.
        least = world.run_on_leader(partial(_least_seconds, tried, option))
        if least is None:
            tried.append(_planned(run, option))
        else:
            tried.append(TriedMesh(option, obstacle=f"at least {seconds_text(least)}"))
    run.config = world.run_on_leader(partial(_chosen, run, tried))


def _least_seconds(tried: Sequence[TriedMesh], config: Config) -> float | None:
    """Returns the least seconds of a mesh with more tensor ranks, where the best so far takes no longer; else None."""
    best = min((mesh for mesh in tried if not mesh.obstacle), key=lambda mesh: mesh.seconds, default=None)
    if best is None or config.parallel.tensor <= best.config.parallel.tensor:
        return None
    least = best.least_seconds(config)
    return least if least >= best.seconds else None


def _chosen(run: RunContext, tried: Sequence[TriedMesh]) -> Config:
    """Returns the run's configuration with the best mesh, and writes it to the run's folder."""
    config = run.config
    fitting = sorted((mesh for mesh in tried if not mesh.obstacle), key=lambda mesh: mesh.seconds)
    if not fitting:
        least = min(tried, key=lambda mesh: mesh.held)
        raise SlipstreamError(
            f"no mesh of {config.num_processes} ranks has a plan that fits: {least.config.mesh_text}: {least.obstacle}"
        )
    fitting.insert(0, fitting.pop(preferred([(mesh.seconds, mesh.config.pipeline.num_ranks) for mesh in fitting])))
    run.progress.say(mesh_table([*fitting, *(mesh for mesh in tried if mesh.obstacle)]))
    meshes = {mesh.config.mesh_text: rounded(mesh.seconds) for mesh in tried if mesh.step is not None}
    plan = config.plan.model_copy(update={"open": [], "predicted": {"meshes": meshes}})
    chosen = fitting[0].config.model_copy(update={"plan": plan})
    with run.folder.replaced(run.folder.config) as part:
        part.write_text(dump_config(chosen), encoding="utf-8")
    return chosen


def preferred(steps: Sequence[tuple[float, int]]) -> int:
    """Returns which mesh is taken, given the planned seconds and the pipeline ranks of each: of those whose steps are
    as short as the shortest within 2%, the one with the fewest ranks, which wait for each other least."""
    shortest = min(steps)[0]
    alike = [(ranks, seconds, place) for place, (seconds, ranks) in enumerate(steps) if seconds <= _ALIKE * shortest]
    return min(alike)[-1]


def mesh_table(meshes: Sequence[TriedMesh]) -> str:
    """Returns one line per mesh, the chosen one first, without the hosts where nothing is there."""
    uses_host = any(mesh.on_host for mesh in meshes)
    columns = [name for name in _COLUMNS if uses_host or name != _ON_HOST]
    return table_text([columns, *([mesh.row()[name] for name in columns] for mesh in meshes)])


def _planned(run: RunContext, config: Config) -> TriedMesh:
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
        return TriedMesh(config, obstacle=str(error))
    assert plan.costs is not None
    step = request.evaluate(plan.costs, plan.plan)
    room = memory_of_a_rank(config)
    more = max(step.peaks()) - room
    obstacle = f"{bytes_text(more)} more than the {bytes_text(room)} of a rank" if more > 0 else ""
    return TriedMesh(config, step, plan.ideal, obstacle)
