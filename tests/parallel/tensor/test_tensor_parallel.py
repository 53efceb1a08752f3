"""Models shared by 2 and 4 real processes have the gradients of one process."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support.forked import launch, selected_cases
from support.paths import WORKERS
from workers.parallel.tensor_parallel import CASES


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.more)])
def ended(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    """All cases in the same processes, which take longer to start than to run them; the first that fails ends them."""
    return launch(request.param, WORKERS / "parallel/tensor_parallel.py", *selected_cases(request))


# What other models and cases have too.
LIKE_OTHERS = {"llama", "qwen3", "gemma2", "gemma3", "olmo2", "gpt_neox", "glm4", "qwen3_moe", "starcoder2, biases"}
LIKE_OTHERS |= {"llama, padding", "llama, as many keys as queries"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.more] * (case in LIKE_OTHERS)) for case in CASES]
)
def test_ranks_share_layers(ended: CompletedProcess[str], case: str) -> None:
    assert f"passed {case}\n" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-3000:]


def test_a_rank_that_is_killed_in_the_self_check_says_nothing_about_the_model(tmp_path: Path) -> None:
    ended = launch(2, WORKERS / "parallel/lost_in_the_check.py", tmp_path / "said")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "said").read_text().startswith("rank 0 waited in an all-reduce for rank 1, which has ended")
