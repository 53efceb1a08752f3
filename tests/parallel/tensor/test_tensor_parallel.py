"""Models shared by 2 and 4 real processes have the gradients of one process."""

from __future__ import annotations

import subprocess

import pytest

from support.forked import launch
from support.paths import WORKERS

WORKER = WORKERS / "parallel/tensor_parallel.py"
CASES = [
    "layers_without_an_mlp_of_their_own",
    "stages_share_what_is_left_of_a_model",
    "each_rank_has_its_share",
    "two_all_reduces_a_layer_each_way",
    "the_loss_is_that_of_all_logits",
    "no_rank_holds_all_logits",
    "nothing_stays_of_a_forward",
    "autocast",
    "ranks_are_told_what_is_their_own",
    "dropout_agrees_where_tensors_do",
    "toys_are_checked",
    "a_plan_may_be_given",
]
MODELS = [
    "llama",
    "llama, tied",
    "llama, biases",
    "llama, padding",
    "llama, as many keys as queries",
    "qwen3",
    "gpt2",
    "mixtral",
    "qwen2_moe, a dense layer",
    "qwen3_moe",
    "gemma2",
    "gemma2, tied, one key head",
    "gemma3",
    "gpt_neox",
    "olmo2",
    "phi3",
    "glm4",
    "starcoder2, biases",
]


@pytest.fixture(scope="module", params=[2, 4])
def ended(request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    """All cases in the same processes, which take longer to start than to run them; the first that fails ends them."""
    return launch(request.param, WORKER)


@pytest.mark.parametrize("case", [*CASES, *MODELS])
def test_ranks_share_layers(ended: subprocess.CompletedProcess[str], case: str) -> None:
    assert f"passed {case}\n" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-3000:]
