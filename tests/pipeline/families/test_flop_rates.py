"""Steps of sequences of different lengths are planned by what the layout's stages compute: not what is frozen, an
adapter's part of the gradients, no head that is spread, and what runs again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream import Memory, Op, Pipeline, Runtime, simulate
from slipstream.planner.find_plan import find_plan
from slipstream.planner.ragged import StageRates
from slipstream.planner.ragged.sliced_step import SlicedStep
from support.adapters import adapted, lora
from support.architectures import build, llama

CONFIG = llama(max_position_embeddings=4096)
FROZEN = ["model.embed_tokens*", *(f"model.layers.{layer}.*" for layer in (0, 1))]
SCORES = 2 * 4 * 8  # multiplications of a token with a key and a value, of a layer


def made(model: Any = None, **options: Any) -> Pipeline:
    options = {"num_ranks": 2, "schedule": "auto", "slices": "auto", "partition": [2, 2]} | options
    options["runtime"] = Runtime(self_check=False)
    return Pipeline.from_config(CONFIG, **options) if model is None else Pipeline(model, **options)


def rates_of(pipe: Pipeline) -> StageRates:
    rates = pipe.rates
    assert rates is not None
    return rates


def per_token(pipe: Pipeline, op: Op) -> list[float]:
    return rates_of(pipe).rates[op][:, 1].tolist()


def per_score(pipe: Pipeline, op: Op) -> list[float]:
    return rates_of(pipe).rates[op][:, 2].tolist()


def matrices(modules: Any, trained: bool = False) -> int:
    parameters = [each for module in modules for each in module.parameters() if each.dim() > 1]
    return sum(each.numel() for each in parameters if each.requires_grad or not trained)


@pytest.fixture(scope="module")
def whole() -> Any:
    return build(CONFIG)


def test_stages_of_which_nothing_is_trained_have_no_backward(whole: Any) -> None:
    pipe, layers, head = made(freeze=FROZEN), matrices(whole.model.layers[:2]), matrices([whole.lm_head])
    assert per_token(pipe, Op.F) == [layers, layers + head]
    assert per_token(pipe, Op.W) == [0, layers + head]
    assert per_token(pipe, Op.I) == [0, layers / 2 + head]  # nothing is trained before the third layer
    assert per_token(pipe, Op.B) == [0, 1.5 * layers + 2 * head]
    assert per_score(pipe, Op.F) == [2 * SCORES, 2 * SCORES]
    assert per_score(pipe, Op.B) == [0, 5 * SCORES]


def test_an_adapter_has_its_own_weight_gradients_alone() -> None:
    model = adapted(lora())
    layers, head = model.base_model.model.model.layers, matrices([model.base_model.model.lm_head])
    trained = [matrices(part, trained=True) for part in (layers[:2], layers[2:])]
    of_layers = [matrices(part) for part in (layers[:2], layers[2:])]
    first = matrices(layers[:1])
    pipe = made(model)
    assert per_token(pipe, Op.F) == [of_layers[0], of_layers[1] + head]
    assert per_token(pipe, Op.W) == trained
    assert per_token(pipe, Op.I) == [of_layers[0] - first, of_layers[1] + head]


def test_a_head_that_is_spread_is_no_part_of_the_last_stage(whole: Any) -> None:
    pipe = made(vocabulary="spread", schedule="1f1b", slices=4, num_microbatches=2)
    layers = matrices(whole.model.layers[:2])
    for op, number in ((Op.F, 1), (Op.B, 2), (Op.I, 1), (Op.W, 1)):
        assert per_token(pipe, op) == [number * layers] * 2


@pytest.mark.parametrize("recompute", ["full", "stage", "stage+full", 1, "selective"])
def test_what_runs_again_takes_longer(whole: Any, recompute: str | int) -> None:
    pipe, plain = made(memory=Memory(recompute=recompute), schedule="1f1b", slices=4), made()
    layer, head = matrices(whole.model.layers[:1]), matrices([whole.lm_head])
    one_by_one = {"full": 2, "stage+full": 2, 1: 1}.get(recompute, 0)
    at_once = 2 * recompute.startswith("stage") if isinstance(recompute, str) else 0
    again = [(one_by_one + at_once) * layer, (one_by_one + at_once) * layer + at_once // 2 * head]
    scores = (one_by_one + at_once) * SCORES
    for op in (Op.F, Op.B, Op.I, Op.W):
        more = np.subtract(per_token(pipe, op), per_token(plain, op)).tolist()
        assert more == (again if op in (Op.B, Op.I) else [0, 0])
        more = np.subtract(per_score(pipe, op), per_score(plain, op)).tolist()
        assert more == ([scores, scores] if op in (Op.B, Op.I) else [0, 0])


def test_plans_are_faster_than_those_for_training_everything() -> None:
    config = llama(num_hidden_layers=8, max_position_embeddings=4096, vocab_size=1000)
    options = {"num_ranks": 4, "schedule": "auto", "slices": "auto", "runtime": Runtime(self_check=False)}
    frozen = [*FROZEN, *(f"model.layers.{layer}.*" for layer in (2, 3))]
    pipe = Pipeline.from_config(config, freeze=frozen, **options)
    partition = [each.stop - each.start for each in pipe.layout.layers]
    everything = Pipeline.from_config(config, partition=partition, **options)

    def seconds(lengths: tuple[int, ...], by: Pipeline) -> float:
        plan = find_plan(by._runtime.plans.settings.step_problem(lengths, rates_of(by)))
        problem = pipe._runtime.plans.settings.step_problem(lengths, rates_of(pipe))
        layout = pipe._runtime.plans.check_and_lay_out(plan.schedule)
        return simulate(layout.training, SlicedStep.of(problem, plan.groups, plan.slices).costs()).makespan

    ratios = [
        seconds(lengths, everything) / seconds(lengths, pipe)
        for lengths in ((1900, 300, 700), (800, 700, 400, 300, 200, 100), (1000,) * 5)
    ]
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) > 1.02
