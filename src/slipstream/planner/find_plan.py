"""The search for a plan: one, whatever of the plan is open."""

from __future__ import annotations

from typing import Any, overload

from slipstream.planner.joint.joint_plan import JointPlan
from slipstream.planner.joint.problem import JointProblem
from slipstream.planner.plan_report import PlanReport
from slipstream.planner.progress import ProgressReport, untold
from slipstream.planner.ragged.step_problem import StepPlan, StepProblem
from slipstream.planner.search.cluster_problem import ClusterProblem


@overload
def find_plan(problem: ClusterProblem, progress: ProgressReport = ...) -> PlanReport: ...
@overload
def find_plan(problem: JointProblem, progress: ProgressReport = ...) -> JointPlan: ...
@overload
def find_plan(problem: StepProblem, progress: ProgressReport = ...) -> StepPlan: ...
def find_plan(problem: ClusterProblem | JointProblem | StepProblem, progress: ProgressReport = untold) -> Any:
    """Returns the plan with the shortest simulated step that the search finds. The same problem gives the same plan.

    The search has levels, and begins at that of the problem. Each tries what has the least lower bound first, until no
    other bound beats what it has found (`BestFirst`), and hands the most promising to the next:

    1. `ClusterProblem`, where the mesh is open: degrees, replicas, and ways to save memory.
    2. `JointProblem`, on a mesh: placement, cut, slices, recomputation, and where the head's rows are.
       `StepProblem`, of sequences of different lengths on stages that stay: microbatches and slices.
    3. The order of the actions.

    Choices that a problem gives are kept on each level.

    Args:
        problem: what is given and what the plan must keep to.
        progress: called with the current task, how many are done, and out of how many (0 where that is unknown).

    Raises:
        OutOfMemoryError: where nothing fits the memory: by how much, and the remedy.
        SlipstreamError: where the given choices allow nothing.
    """
    # Each search loads its compiled code when it is needed.
    if isinstance(problem, ClusterProblem):
        from slipstream.planner.search.plan_search import search_meshes

        return search_meshes(problem, progress)
    if isinstance(problem, StepProblem):
        from slipstream.planner.ragged.step_memory import search_within_memory

        return search_within_memory(problem)
    from slipstream.planner.joint.vocabulary_search import search_jointly

    return search_jointly(problem, progress)
