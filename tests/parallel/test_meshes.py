"""Real processes keep what is promised of meshes, axes, replicas and tensor ranks, and train as one process does."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from support.forked import launch
from support.paths import ROOT, WORKERS
from workers.parallel import (
    context,
    data_parallel,
    expert_parallel,
    mesh,
    random_meshes,
    tensor_parallel,
    token_parts,
    zero3,
)

BOUND = 1e-9
Runs = Callable[[str, int], CompletedProcess[str]]


def cases(
    program: Any,
    num_processes: int,
    left_out: Collection[str] = (),
    grid: Collection[str] = (),
    chosen: Collection[str] | None = None,
) -> list[Any]:
    """A row for each case of a program; `make test` leaves some out, and `make test-all` those of `grid`."""
    name = program.__name__.rpartition(".")[2]
    return [
        pytest.param(
            *(name, num_processes, case),
            marks=[pytest.mark.grid] * (case in grid) or [pytest.mark.more] * (case in left_out),
            id=f"{name} {num_processes}-{case}",
        )
        for case in (program.CASES if chosen is None else chosen)
    ]


ZERO3 = {"sharded_parameters_train_as_the_whole_model", "what_cant_be_sharded_is_refused"}
# Each part of a model in one of them; `make exactness` runs the others, of which some only have what others have too.
TENSOR = {"qwen2_moe, a dense layer", "gemma2, tied, one key head", "adapter: DoRA", "adapter: trained copies"}
TENSOR |= {name for name, case in tensor_parallel.CASES.items() if not isinstance(case, partial)}
AT_ONCE = {"layers_without_an_mlp_of_their_own", "stages_share_what_is_left_of_a_model", "each_rank_has_its_share"}
AT_ONCE |= {"two_all_reduces_a_layer_each_way", "the_loss_is_that_of_all_logits", "ranks_are_told_what_is_their_own"}
AT_ONCE |= {
    "a_plan_may_be_given",
    "qwen2_moe, a dense layer",
    "adapter: trained copies",
    "what_cannot_be_cut_is_refused",
}
DATA = {"sums_are_those_of_one_process", "reductions_run_beside_the_pipeline", "tied_weights_are_delivered_whole"}
DATA |= {"calls_and_bytes_are_those_of_the_formulas", "three_steps_of_adamw", "all_ranks_skip_the_same_step"}
DATA |= {"masters_on_the_host_to_the_bit", "rows_that_ranks_of_one_process_share_are_complete"}
MESH = {"auto", "planned_halves", "every_model_mesh_and_kind_of_rows", "optimizer_on_the_host"}
CONTEXT = {
    "heads, llama, tied",
    "keys, documents, gpt_oss",
    "apart",
    "exchanged_bytes",
    "gathered_bytes",
    "values",
    "refused",
}
CONTEXT |= {"pp2 cp2, heads, gpt_oss", "values", "on the host, keys, gpt_oss"}
# `make test-all` has each of these with the other exchange, but for models and rows that others have with it.
OTHER_EXCHANGE = {f"{kind}, {title}" for kind, (title, *_) in zip(cycle(context.KINDS), context.PER_KIND, strict=False)}
OTHER_EXCHANGE |= {"heads, qwen3", "heads, gpt_oss", "heads, documents, llama", "keys, llama, tied"}
# Others have what these have: a plan, split backwards, sharded states, sequences, experts.
OF_FOUR = {"auto", "zb-h1", "sharded optimizer", "sequences", "sequences, cp4", "qwen3_moe"}
# Whatever a model is, its blocks come from the host as on one rank, for which test_context_on_host has all: of meshes
# each way to share them is there with two models, and a state that layers carry.
OF_FOUR |= {name for name in context.MESHES if name.startswith("on the host")} - {
    "on the host, heads, llama",
    "on the host by half, heads, gpt_oss",
    "on the host by half, keys, llama",
    "on the host, replicas, gpt_oss",
    "on the host, replicas, llama",
    "on the host, replicas, qwen3_next",
    "on the host, documents",
    "on the host, sequences",
}
# Routers and layouts of experts that others have too, on two ranks and on four.
EXPERTS = {"mixtral", "gpt_oss", "glm4_moe"}
# What depends on how many ranks there are; for all else two are enough.
DATA_OF_FOUR = {"sums_are_those_of_one_process", "calls_and_bytes_are_those_of_the_formulas"}
TENSOR_OF_FOUR = {"each_rank_has_its_share", "two_all_reduces_a_layer_each_way", "qwen2_moe, a dense layer"}
CASES = [
    *cases(mesh, 4, mesh.CASES, MESH, mesh.OF_FOUR),
    *cases(mesh, 2, mesh.CASES, chosen=["planned_from_measured_costs"]),
    *cases(mesh, 6, mesh.CASES, chosen=["pipelines_beside_each_other"]),
    *cases(token_parts, 2),
    *cases(context, 2, context.TWO.keys() - CONTEXT, OTHER_EXCHANGE - CONTEXT, chosen=context.TWO),
    *cases(
        context,
        4,
        context.MESHES.keys() - CONTEXT,
        grid=({name for name in context.MESHES if name.partition(",")[0] in context.FOUR} | OF_FOUR) - CONTEXT,
        chosen=context.MESHES,
    ),
    *cases(expert_parallel, 2, expert_parallel.CASES.keys() - {"qwen3_moe", "memory", "packed_documents"}, EXPERTS),
    *cases(
        expert_parallel,
        4,
        expert_parallel.OF_FOUR,
        grid=["every_model_and_way_to_shard"],
        chosen=expert_parallel.OF_FOUR,
    ),
    *[
        case
        for size, numbers in ((2, random_meshes.OF_TWO), (4, random_meshes.OF_FOUR))
        for case in cases(
            random_meshes, size, random_meshes.CASES.keys() - random_meshes.AT_ONCE, chosen=random_meshes.cases(numbers)
        )
    ],
    *cases(zero3, 2, zero3.CASES.keys() - ZERO3),
    *cases(zero3, 4, grid=zero3.CASES),
    *cases(data_parallel, 2, data_parallel.CASES.keys() - DATA),
    *cases(data_parallel, 4, DATA, grid=data_parallel.CASES.keys() - DATA_OF_FOUR),
    *cases(tensor_parallel, 2, TENSOR - AT_ONCE, grid=tensor_parallel.CASES.keys() - TENSOR),
    *cases(tensor_parallel, 4, AT_ONCE, grid=tensor_parallel.CASES.keys() - TENSOR_OF_FOUR),
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, compiled_search: None) -> Runs:
    """Runs the selected cases of a program in one set of processes, which take longer to start than to run them; the
    first case that fails ends them."""
    chosen: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for item in request.session.items:
        if item.path == request.path and "case" in item.fixturenames:
            given = item.callspec.params
            chosen[given["program"], given["num_processes"]].append(given["case"])

    @cache
    def run(program: str, num_processes: int) -> CompletedProcess[str]:
        return launch(num_processes, WORKERS / f"parallel/{program}.py", *chosen[program, num_processes])

    return run


@pytest.mark.parametrize(("program", "num_processes", "case"), CASES)
def test_processes_keep_what_is_promised(runs: Runs, program: str, num_processes: int, case: str) -> None:
    ended = runs(program, num_processes)
    assert f"passed {case}\n" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-4000:]


def test_no_source_names_the_axis_that_splits_tokens() -> None:
    sources = (ROOT / "src" / "slipstream").rglob("*.py")
    assert [path for path in sources if f'"{token_parts.NAME}"' in path.read_text(encoding="utf-8")] == []


def test_a_rank_that_is_killed_in_the_self_check_says_nothing_about_the_model(tmp_path: Path) -> None:
    ended = launch(2, WORKERS / "parallel/lost_in_the_check.py", tmp_path / "said")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "said").read_text().startswith("rank 0 waited in an all-reduce for rank 1, which has ended")


# Some of the six models of parallel/exactness.py on each mesh, of which random meshes have other combinations; `make
# exactness` has all models on every mesh of up to eight processes.
MODELS = {
    (2, 2, 1): ("llama, tied", "mixtral"),
    (2, 1, 2): ("qwen3", "llama, adapted", "mixtral"),
    (1, 2, 2): ("gpt2", "llama"),
}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("axes", "model"),
    [
        pytest.param(
            axes,
            model,
            id="pp{} dp{} tp{}, {}".format(*axes, model),
        )
        for axes, models in MODELS.items()
        for model in models
    ],
)
def test_a_mesh_trains_as_one_process(axes: tuple[int, int, int], model: str) -> None:
    ended = launch(4, WORKERS / "parallel/exactness.py", *map(str, axes), model)
    assert ended.returncode == 0, ended.stderr[-3000:]
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(results) == (3 if axes[0] > 1 else 2)
    for result in results:
        assert result["model"] == model
        assert result["error"] < BOUND, result


@pytest.fixture(scope="module")
def predicted() -> list[dict[str, Any]]:
    report = json.loads((ROOT / "benchmarks" / "results" / "papers.json").read_text())
    rows: list[dict[str, Any]] = report["megatron table 2"]["rows"]
    return rows


def test_zero3_in_the_paper_lies_between_all_and_no_overlap(predicted: list[dict[str, Any]]) -> None:
    rows = [row for row in predicted if row["scheme"] == "zero3"]
    assert len(rows) == 6
    for row in rows:
        assert row["seconds"] < row["paper seconds"] < row["seconds without overlap"]


def test_zero3_sends_as_much_on_any_number_of_gpus_and_ptdp_less(predicted: list[dict[str, Any]]) -> None:
    """3 (n-1)/n of the parameters' bytes; and the order of the two systems is the paper's in every pair of rows."""
    zero3, ptdp = ([row for row in predicted if row["scheme"] == scheme] for scheme in ("zero3", "ptdp"))
    for row in zero3:
        assert row["sent"] == pytest.approx(6 * row["parameters"] * (row["gpus"] - 1) / row["gpus"], rel=1e-12)
    for one, other in zip(zero3, ptdp, strict=True):
        assert other["out of a node"] < one["out of a node"] / 5
        if one["gpus"] >= 768:
            assert other["predicted"] > one["predicted"]
            assert other["paper"] > one["paper"]
