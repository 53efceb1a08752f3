"""What every record in results/ is of, and whether its sources have changed since.

    python -m benchmarks.records                    # writes the tables of docs/benchmarks.md

A record names a commit and the hash of the sources that it measured. If they hash to something else now, the page calls
the record older: its numbers may still hold, but nobody has measured the sources as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import long_sequence_page, plan_search_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
TRIAL = "BENCHMARK_TRIAL"  # set to a folder where programs take few cases and write there
SUFFIXES = {".py", ".yaml"}  # of the files that can change a number


@dataclass(frozen=True)
class Subject:
    """A record's subject: what was measured, by which program, and the sources that its numbers depend on."""

    what: str
    program: str
    options: str = ""
    sources: tuple[str, ...] = ("src/slipstream",)

    @property
    def command(self) -> str:
        return f"python -m benchmarks.{self.program} {self.options}".rstrip()

    @property
    def paths(self) -> tuple[str, ...]:
        """The sources, the program itself among them, relative to the repository."""
        path = Path("benchmarks", *self.program.split("."))
        return *self.sources, str(path if (ROOT / path).is_dir() else path.with_suffix(".py"))


def _room(*names: str) -> tuple[str, ...]:
    return tuple(f"src/slipstream/{name}" for name in names)


_PLANNER = _room("cost", "planner", "profile", "schedule", "simulator")
_PAPERS = (*_PLANNER, "benchmarks/papers")
_PIPELINE = ("src/slipstream", "benchmarks/isolated.py", "benchmarks/peers.py", "benchmarks/contenders.py")
_GPIPE = ("src/slipstream", "benchmarks/gpipe", "examples/gpipe")
_HOST_TIME = ("src/slipstream", "benchmarks/gpu_layers.py")
_OLDER_ROUNDS = "--lengths 4096 --sequences 2 4 8 --ours auto --repeats 5 --warmups 2 --steps 1"

SUBJECTS = {
    "auto_2048": Subject(
        'one sequence of 2048 tokens, all on "auto"',
        "token_slices",
        "--lengths 2048 --sequences --ours auto turns --apart --repeats 3 --warmups 0 --steps 3 --name auto_2048 --add"
        " --costs runs/costs",
        _PIPELINE,
    ),
    "auto_4096": Subject(
        'one sequence of 4096 tokens, all on "auto"',
        "token_slices",
        "--lengths 4096 --sequences --ours auto turns --apart --repeats 2 --warmups 0 --steps 2 --name auto_4096 --add"
        " --costs runs/costs",
        _PIPELINE,
    ),
    "auto_grid": Subject(
        'all on "auto" against grids made by hand, for four models',
        "auto_grid",
        "--model deep --costs runs/costs --quick",
        (*_PIPELINE, "benchmarks/auto_grid_models.py"),
    ),
    "auto_planned": Subject(
        'steps next to what "auto" has planned, for six models',
        "auto_planned",
        sources=(*_PIPELINE, "benchmarks/auto_grid_models.py"),
    ),
    "mesh_grid": Subject(
        "the mesh that is chosen, against the best pipeline, two replicas and DDP of PyTorch",
        "mesh_grid",
        "",
        _PIPELINE,
    ),
    "in_turns": Subject(
        "one sequence of 2048 tokens, three stages a rank",
        "token_slices",
        "--lengths 2048 --sequences --ours turns --repeats 5 --warmups 1 --name in_turns",
        _PIPELINE,
    ),
    "in_turns_4096": Subject(
        "one sequence of 4096 tokens, three stages a rank",
        "token_slices",
        "--lengths 4096 --sequences --ours turns --repeats 4 --warmups 1 --steps 2 --name in_turns_4096",
        _PIPELINE,
    ),
    "token_slices": Subject(
        "one sequence of 2048 tokens, one stage a rank",
        "token_slices",
        "--lengths 2048 --sequences --ours whole auto --apart --repeats 7 --steps 1",
        _PIPELINE,
    ),
    "long_and_several": Subject(
        "one sequence of 4096 tokens; 2, 4 and 8 of 1024",
        "token_slices",
        f"{_OLDER_ROUNDS} --name long_and_several",
        _PIPELINE,
    ),
    "token_slices_epyc": Subject(
        "one sequence of 2048 tokens",
        "token_slices",
        "--lengths 2048 --sequences --ours whole auto --apart --repeats 7 --warmups 2 --steps 1"
        " --name token_slices_epyc",
        _PIPELINE,
    ),
    "token_slices_4096_epyc": Subject(
        "one sequence of 4096 tokens",
        "token_slices",
        "--lengths 4096 --sequences --ours auto --repeats 3 --warmups 2 --steps 1 --name token_slices_4096_epyc",
        _PIPELINE,
    ),
    "microbatches_epyc": Subject(
        "2 and 4 sequences of 1024 tokens",
        "token_slices",
        "--lengths --sequences 2 4 --repeats 3 --steps 1 --name microbatches_epyc",
        _PIPELINE,
    ),
    "microbatches_8_epyc": Subject(
        "8 sequences of 1024 tokens",
        "token_slices",
        "--lengths --sequences 8 --repeats 3 --warmups 1 --steps 1 --name microbatches_8_epyc",
        _PIPELINE,
    ),
    "eight_256_epyc": Subject(
        "8 sequences of 256 tokens",
        "token_slices",
        "--lengths --sequences 8 --batch-length 256 --fewer 1 2 4 --repeats 3 --warmups 2 --steps 1"
        " --name eight_256_epyc",
        _PIPELINE,
    ),
    "predicted_2_ranks": Subject("simulated against measured steps, two processes", "predicted"),
    "predicted_4_ranks": Subject("the same, four ranks in one process", "predicted", "--ranks 4"),
    "ragged": Subject(
        "documents of different lengths, against padding and packing",
        "ragged",
        sources=("src/slipstream", "benchmarks/isolated.py", "benchmarks/ragged_batches.py"),
    ),
    "planned": Subject("plans against runs: step time and peak memory", "planned"),
    "memory": Subject("predicted against counted memory, by rank and kind", "memory"),
    "executor_overhead": Subject("what the executor adds to a step", "executor_overhead"),
    "attention": Subject(
        "sliced against unsliced attention", "attention", sources=_room("attention", "pipeline/batch.py")
    ),
    "checkpoint": Subject("what saving a checkpoint costs training", "checkpoint"),
    "slow_link": Subject(
        "one sequence over a slow link, whole and in slices", "slow_link", "--length 1024 --repeats 3"
    ),
    "command_line": Subject("the time of `slipstream --help`", "command_line"),
    "plan_search": Subject("how long whole plans take to find", "plan_search", sources=_PLANNER),
    "plan_requests": Subject(
        "ten requests to `slipstream plan`, what slices gain, and the CPU seconds of each",
        "plan_requests",
        sources=_PLANNER,
    ),
    "joint_search": Subject(
        "how long the joint search takes, and how far from its bounds it ends",
        "plan_search",
        "--joint",
        (*_PLANNER, "benchmarks/joint_problems.py"),
    ),
    "plan_lengths": Subject(
        "how long plans of large models on 8 to 16,384 GPUs take to find, and the memory of that",
        "plan_search",
        "--lengths",
        _PLANNER,
    ),
    "step_search": Subject("how long the plan of a step takes to find, within memory limits", "plan_search", "--steps"),
    "model_paths": Subject(
        "attention by a model's own code, and a hybrid next to GPipe of PyTorch",
        "model_paths",
        "--repeats 2",
        (*_PIPELINE, "benchmarks/model_paths.py"),
    ),
    "schedule_search": Subject("found orders against their lower bound", "schedule_search", sources=_PLANNER),
    "slicing": Subject("exact slicing against TeraPipe's Algorithm 1", "slicing", sources=_PLANNER),
    "papers": Subject("the papers' tables, predicted", "papers", sources=_PLANNER),
    "measured_steps": Subject("published steps on clusters, predicted", "papers.measured_steps", sources=_PAPERS),
    "practice": Subject("how others train on H100 next to the best plans", "papers.practice", sources=_PAPERS),
    "zero3": Subject("bytes and seconds next to ZeRO-3", "zero3"),
    "gpu_layers": Subject("Llama-3-8B's layers on a GPU, in slices", "gpu_layers"),
    "gpu_layers_fused": Subject("the same with fused kernels", "gpu_layers", "--fused --repeats 1"),
    "gpu_attention": Subject("attention in slices against PyTorch's best kernel on a GPU", "gpu_attention"),
    "gpu_context": Subject(
        "one long sequence on a GPU, its context on the host and on the device, beside transformers",
        "gpu_context",
        sources=("src/slipstream", "benchmarks/gpu_layers.py"),
    ),
    "gpu_steps": Subject("a step of two stages on one GPU against its plan", "gpu_steps"),
    "gpu_profile": Subject("a profile against held-out times on a GPU", "gpu_profile", "--budget 55"),
    "fused_cuda": Subject("layers with and without fused kernels, GPU", "fused", "--device cuda"),
    "fused_cpu": Subject("layers with and without fused kernels, CPU", "fused"),
    "host_time_cpu": Subject("what a layer and slice take of the host, CPU", "host_time", "--device cpu", _HOST_TIME),
    "host_time_cuda": Subject("what a layer and slice take of the host, GPU", "host_time", "--device cuda", _HOST_TIME),
    "lora": Subject("LoRA against full training and against PEFT in one process", "lora", sources=_PIPELINE),
    "streaming": Subject("memory and data waits of a run that streams 2 GB of conversations", "streaming"),
    "fault_overhead": Subject("what finding faults costs a run without any", "fault_overhead", "--blocks 130"),
    "recompute_check": Subject("what comparing recomputed outputs costs a step", "recompute_check", sources=_PIPELINE),
    "checkpointing": Subject(
        "recomputation beside transformers' gradient checkpointing, bytes and seconds",
        "checkpointing",
        "--repeats 3",
        _PIPELINE,
    ),
    "soak": Subject("a run in hundreds of faults, and its weights after them", "soak"),
    "soak_lost": Subject(
        "a run that loses processes for good and gets them back, and its weights after that",
        "soak",
        '--steps 200 --faults 5 --seed 3 --stall-limit 30 --kinds "gone for good" --name soak_lost',
    ),
    "end_of_a_rank": Subject("how soon the command ends after a rank is killed, on busy cores", "end_of_a_rank"),
    "gpipe_memory_formula": Subject("GPipe's peak activations", "gpipe.memory", "formula", _GPIPE),
    "gpipe_memory_amoebanet_d": Subject("GPipe's Table 1, AmoebaNet-D", "gpipe.memory", "AmoebaNet-D", _GPIPE),
    "gpipe_memory_transformer_l": Subject("GPipe's Table 1, Transformer-L", "gpipe.memory", "Transformer-L", _GPIPE),
    "gpipe_throughput": Subject("GPipe's Tables 2 and 3", "gpipe.throughput", sources=_GPIPE),
    "gpipe_breakdown": Subject("GPipe's Table 4", "gpipe.breakdown", sources=_GPIPE),
    "gpipe_peers": Subject("ResNet-50 next to PyTorch's pipelines", "gpipe.peers", sources=_GPIPE),
    "all_peers": Subject("every way to spread a step over two processes, in one run", "all_peers"),
    "spread": Subject(
        "slices that two ranks share and experts spread over them, beside peers",
        "spread",
        sources=(*_PIPELINE, "benchmarks/all_peers.py"),
    ),
    "long_sequence": Subject(
        "memory and seconds over the length of a sequence, beside transformers", "long_sequence", sources=_PIPELINE
    ),
    "exactness": Subject(
        "gradients on 32 meshes against one process",
        "exactness",
        sources=("src/slipstream", "tests/workers/parallel/exactness.py"),
    ),
    "random_exactness": Subject(
        "random combinations against the unsplit model in one process",
        "random_exactness",
        sources=("src/slipstream", "benchmarks/zoo", "tests/support"),
    ),
    "random_meshes": Subject(
        "random combinations where ranks share slices or experts, against one process",
        "random_exactness",
        "--meshes",
        ("src/slipstream", "benchmarks/zoo", "tests/support"),
    ),
    "random_context": Subject(
        "random combinations with keys and values on the host against the unsplit model",
        "random_exactness",
        "--context host",
        ("src/slipstream", "benchmarks/zoo", "tests/support"),
    ),
    "loss_curves": Subject("100 losses on meshes of one to eight processes", "loss_curves"),
    "zoo": Subject(
        "which architectures of transformers are exact in slices",
        "zoo",
        sources=_room("attention", "model", "sequential"),
    ),
    "same_numbers": Subject("losses and gradients of ten trainings, bit for bit", "same_numbers", "--record"),
}


def digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Hashes files, given as paths relative to the repository with their contents."""
    hashed = hashlib.sha256()
    for path, content in sorted(files):
        hashed.update(f"{path}\0{len(content)}\0".encode() + content)
    return hashed.hexdigest()[:16]


def read_sources(paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yields each source file below `paths` as it is now; a path that is gone has none."""
    for path in paths:
        found = ROOT / path
        for file in sorted(found.rglob("*")) if found.is_dir() else [found]:
            if file.suffix in SUFFIXES and file.is_file():
                yield file.relative_to(ROOT).as_posix(), file.read_bytes()


def _subject(name: str) -> Subject:
    """Returns the subject of the record `name`; a record that is not listed is of everything its program may use."""
    if name in SUBJECTS:
        return SUBJECTS[name]
    spec = sys.modules["__main__"].__spec__
    program = spec.name.removeprefix("benchmarks.").removesuffix(".__main__") if spec is not None else name
    return Subject(name, program)


def provenance(name: str) -> dict[str, Any]:
    """Returns what a record written now is of: the commit, with "+" where sources differ from it, and their hash."""
    paths = _subject(name).paths
    commit = _git("rev-parse", "--short", "HEAD")
    changed = "+" if commit and _git("status", "--porcelain", "--", *paths) else ""
    return {
        "commit": f"{commit}{changed}" or "unknown",
        "sources": list(paths),
        "sha256": digest(read_sources(paths)),
    }


def _git(*arguments: str) -> str:
    """Returns what git prints, or nothing where this is not a repository."""
    try:
        ended = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def is_current(record: dict[str, Any]) -> bool:
    """Returns whether the sources that a record names hash to what they hashed to when it was written."""
    of = record["of"]
    return bool(digest(read_sources(of["sources"])) == of["sha256"])


def machine(record: dict[str, Any]) -> str:
    """Names the processor or GPU of a record and its PyTorch."""
    found = record.get("setting")
    if found is None:
        return "computed, not measured"
    device = found.get("device", "cpu")
    cores = f"{found['cores']} cores, {found['cpu'].replace('(R)', '').removesuffix(' Processor')}"
    return f"{device if device != 'cpu' else cores}; torch {found['torch'].partition('+')[0]}"


def _states(name: str) -> list[list[str]]:
    """Returns, of each part of a record, its name, its machine and commit, and whether its sources have changed since.

    The models of some records are measured one at a time: each has a provenance and a setting of its own.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return [[f"`{name}`", "none so far", "", "not measured"]]
    record = json.loads(path.read_text())
    models = {f"`{name}`, {model}": row for model, row in record.get("models", {}).items() if "of" in row}
    return [[part, *_state(found)] for part, found in (models or {f"`{name}`": record}).items()]


def _state(record: dict[str, Any]) -> list[str]:
    state = "unchanged" if is_current(record) else "changed: **older**"
    return [machine(record), f"`{record['of']['commit']}`", state]


def tables() -> dict[str, str]:
    """Returns the generated parts of the page by the name of their mark."""
    lines = ["| record | what it measures | machine | commit | sources since |", "| --- | --- | --- | --- | --- |"]
    for name, subject in SUBJECTS.items():
        lines += [f"| {' | '.join([part, subject.what, *state])} |" for part, *state in _states(name)]
    width = max(map(len, SUBJECTS))
    commands = [f"{name:{width}}  {subject.command}" for name, subject in SUBJECTS.items()]
    long = RESULTS / "long_sequence.json"
    searches = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("plan_search", "plan_lengths")]
    return {
        "long sequences": long_sequence_page.text(json.loads(long.read_text())) if long.exists() else "",
        "searches": plan_search_page.text(*searches),
        "records": "\n".join(lines) + "\n",
        "commands": "\n".join(["```text", *commands, "```"]) + "\n",
    }


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """Returns a page's text with other generated parts, by the names of the marks around them."""
    for name, content in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"the page has no part between {begin!r} and {end!r}"
        text = before + begin + content + end + after
    return text


def with_tables(text: str) -> str:
    """Returns the page's text with its generated parts as the records have them."""
    return with_parts(text, tables())


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
