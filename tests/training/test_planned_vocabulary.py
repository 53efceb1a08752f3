"""A run spreads the rows of a heavy head over its ranks, by its plan or as it was told, from start to export."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.forked import run_alone
from support.parameters import first_of
from support.paths import WORKERS
from support.tiny_training import TEXT, half_of, losses_of, run_training, tiny_llama

LENGTH, WORDS = 64, 300
SETTINGS: dict[str, Any] = {
    "model": {
        "config": tiny_llama(
            num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=LENGTH, tie_word_embeddings=False
        )
    },
    "data": {"vocab_size": WORDS, "validation_fraction": 0, "files": ["text.txt"]},
    "runtime": {"self_check": False},
    "training": {"seq_len": LENGTH, "batch_size": 4, "steps": 4, "output": "runs"},
    "checkpoint": {"every": 2},
}


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)


def settings_of(**sections: dict[str, Any]) -> dict[str, Any]:
    """The settings above, with others in some of their sections."""
    every = {name: {} for name in sections} | SETTINGS
    return {name: values | sections.get(name, {}) for name, values in every.items()}


def train(settings: dict[str, Any] | Path, output: Path, *more: str, processes: int = 2) -> CompletedProcess[str]:
    return run_training(processes, output, settings, f"--data.files=[{output.parent / 'text.txt'}]", *more)


def logits(folder: Path) -> Tensor:
    """Of what the run exported, as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    found: Tensor = model(torch.arange(LENGTH)[None]).logits.detach()
    return found


@pytest.mark.grid
@pytest.mark.usefixtures("compiled_search")
@pytest.mark.parametrize(("replicas", "tied"), [(1, False), (2, False), (1, True), (2, True)])
def test_a_plan_spreads_a_heavy_head(tmp_path: Path, replicas: int, tied: bool) -> None:
    """The run that resumes, and the one from the plan file, have it spread too, and train the same to the bit."""
    processes = 2 * replicas
    config = SETTINGS["model"]["config"] | {"tie_word_embeddings": tied}
    free = settings_of(parallel={"data": replicas}, model={"config": config})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(free))
    assert run_alone(WORKERS / "training/keep_heavy_head.py", tmp_path / "run.yaml", str(processes)).returncode == 0
    first, again, planned = (tmp_path / name for name in ("first", "again", "planned"))
    said = train(free, first, processes=processes).stdout
    assert "measuring" not in said
    assert "The head is spread: whole, on one rank, a step takes +" in said
    plan = yaml.safe_load((first / "plan.yaml").read_text())
    assert plan["pipeline"]["vocabulary"] == "spread"
    for name in ("plan.txt", "schedule.txt"):
        assert "V0.0" in (first / name).read_text()
        assert ("E0.0" in (first / name).read_text()) == tied

    half_of(first, again, 2)
    said = train(free, again, "--checkpoint.resume=latest", processes=processes).stdout
    more = [f"--data.vocab_size={WORDS}", "--data.validation_fraction=0", "--training.steps=4"]
    said += train(first / "plan.yaml", planned, *more, "--runtime.self_check=false", processes=processes).stdout
    assert "stages on ranks" not in said
    assert losses_of(again) == losses_of(first)[2:]
    assert losses_of(planned) == losses_of(first)
    for run in (again, planned):
        assert torch.equal(logits(run), logits(first))


@pytest.mark.more
@pytest.mark.parametrize(
    ("sections", "processes"),
    first_of(
        [
            ({"pipeline": {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "slices": 4}}, 2),
            ({"pipeline": {"schedule": "zb-h1", "slices": 4}}, 2),
            ({"pipeline": {"schedule": "1f1b", "slices": 3}, "parallel": {"data": 2}}, 4),
            ({"pipeline": {"schedule": "1f1b", "slices": 3}, "data": {"packing": "none"}}, 2),
        ],
        1,
        "grid",
    ),
    ids=["interleaved", "zb-h1", "replicas", "unpacked"],
)
def test_a_named_schedule_takes_a_spread_head(
    tmp_path: Path, sections: dict[str, dict[str, Any]], processes: int
) -> None:
    """It trains, resumes and exports as with a whole one."""
    file = settings_of(**sections)
    runs = {name: tmp_path / name for name in ("whole", "spread", "again")}
    for name in ("whole", "spread"):
        train(file, runs[name], f"--pipeline.vocabulary={name}", processes=processes)
        assert ("V0.0" in (runs[name] / "schedule.txt").read_text()) == (name == "spread")
    assert losses_of(runs["whole"]) == pytest.approx(losses_of(runs["spread"]), rel=1e-5)
    torch.testing.assert_close(logits(runs["whole"]), logits(runs["spread"]), rtol=1e-3, atol=1e-4)
    half_of(runs["spread"], runs["again"], 2)
    train(file, runs["again"], "--pipeline.vocabulary=spread", "--checkpoint.resume=latest", processes=processes)
    assert losses_of(runs["again"]) == losses_of(runs["spread"])[2:]
    assert torch.equal(logits(runs["again"]), logits(runs["spread"]))
