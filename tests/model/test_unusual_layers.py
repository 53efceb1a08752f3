"""Layers that carry states, attend by code of their own, take more than hidden states, or select keys: exact all."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream import Action, Memory, Op, Pipeline, SlipstreamError
from slipstream.attention import ContextStore, KeyRanges
from slipstream.model import causal_cross_entropy, check_sliceable, find_anatomy
from slipstream.model.hooks.crossing_tensors import find_layer_tensors
from slipstream.model.toy import perturb_parameters, shapes_model
from slipstream.profile import count_model
from support.architectures import BOUND, build, gradient_error, llama, no_rounding_inside, tokens, unsplit_step
from support.exact_steps import documents_error, sequences_error, step_error
from support.hybrids import HYBRIDS, LENGTH
from support.observers import BeforeEach
from support.parameters import each_once, first_of
from support.pipelines import make_pipe
from support.unusual_layers import CROSSING, OWN_ATTENTION, SPARSE
from support.versions import since

SLICES = [5, 1, 46, 44]  # the second alone in its slice
STATES = ["qwen3_next", "lfm2", "bamba", "minimax", "jamba", "recurrent_gemma", "rwkv", "xlstm", "zaya"]  # one of each
SETTINGS = [
    {"schedule": "zb-h1", "recompute": "full"},
    {"recompute": "selective", "offload": 0.5},
    {"recompute": 1, "num_ranks": 1},
    {"schedule": "zb-v", "stages_per_rank": 2},
    {"slices": 3, "num_microbatches": 1, "schedule": "gpipe", "offload": 1.0},
]
DOCUMENTS = [(6, 20, 70), (40, 1, 11, 44)]  # at a slice's first token, within one, for one token, and twice in a slice


def unsplit(name: str) -> PreTrainedModel:
    """The model in float64, with the attention by which its own code knows it."""
    if name in HYBRIDS:
        model = build(HYBRIDS[name]).double()  # OLMo's decays stay float32, and so would their gradients
    elif name in CROSSING:
        model = build(CROSSING[name])
    else:
        own = {"attn_implementation": "eager", "experts_implementation": "eager"} if name in SPARSE else {}
        torch.manual_seed(0)
        config = copy.deepcopy((OWN_ATTENTION | SPARSE)[name])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **own)
    perturb_parameters(model)
    return model


def error_of(name: str, model: PreTrainedModel | None = None, **settings: Any) -> float:
    return step_error(model or unsplit(name), tokens(length=LENGTH), **{"slices": SLICES} | settings)


def states(parameters: list[Any]) -> list[Any]:
    """Marks those parameters whose first value is an architecture that carries states."""
    return [pytest.param(*p.values, marks=[*p.marks, *[since("5.21")] * (p.values[0] in HYBRIDS)]) for p in parameters]


@pytest.mark.parametrize(
    "name", states([*first_of(HYBRIDS), *first_of(OWN_ATTENTION, 2), *first_of(CROSSING), *first_of(SPARSE)])
)
def test_gradients_are_those_of_the_unsplit_model(name: str) -> None:
    assert error_of(name) < BOUND


@since("5.21")
def test_a_state_without_its_gradient_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.attention.store._add_gradient", lambda *_: None)
    assert error_of("lfm2", self_check=False) > 1e-4


def test_prefixes_without_their_gradients_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = ContextStore.finish

    def only_own(store: ContextStore, call: Hashable, ranges: KeyRanges) -> list[Tensor]:
        for total in store._contexts[call].buffers[2:]:
            total[:, :, : ranges.start] = 0
        return finish(store, call, ranges)

    monkeypatch.setattr(ContextStore, "finish", only_own)
    assert error_of("gptj", self_check=False) > 1e-4


@pytest.mark.parametrize(
    ("name", "settings"),
    states(
        [
            *(pytest.param(*reversed(p.values), marks=p.marks) for p in each_once(SETTINGS, STATES, 1)),
            *(
                pytest.param(*reversed(p.values), marks=p.marks)
                for p in each_once(SETTINGS, ["bloom", "falcon", "gpt_neo"], 1)
            ),
        ]
    ),
)
def test_with_split_backwards_recomputation_and_offload(name: str, settings: dict[str, Any]) -> None:
    assert error_of(name, self_check=False, **settings) < BOUND


@pytest.mark.parametrize("name", first_of([*SPARSE], 1))
def test_queries_that_select_no_key_of_a_block_on_the_host(name: str) -> None:
    assert error_of(name, self_check=False, context="host", slices=[16] * 6) < BOUND


@pytest.mark.parametrize(
    "settings", first_of([{"recompute": "stage"}, {"recompute": "full", "num_microbatches": 1}], 1)
)
def test_a_share_of_keys_that_an_indexer_selects_by_may_be_on_the_host(settings: dict[str, Any]) -> None:
    """Before these are needed again, and where only some of them are there."""
    assert error_of("deepseek_v32", self_check=False, context=0.4, slices=[16, 30, 20, 30], **settings) < BOUND


@pytest.mark.parametrize("context", ["host", 0.5])
def test_an_indexers_keys_are_on_the_host(context: str | float) -> None:
    """Between two actions, in as many bytes as on the device without."""
    held: dict[str | float, tuple[int, int]] = {}
    for where in ("device", context):
        pipe = make_pipe(copy.deepcopy(SPARSE["deepseek_v32"]), slices=4, context=where, self_check=False)
        found = list[tuple[int, int]]()

        def watch(action: Action, state: Any, found: list[tuple[int, int]] = found) -> None:
            if (action.op, action.slice) == (Op.F, 3):
                stores = state.stores.values()
                found.append((sum(each.num_bytes for each in stores), sum(each.host_bytes for each in stores)))

        pipe._runtime.executors[0].observe(BeforeEach(watch))
        pipe.step(tokens(), tokens())
        held[where] = found[0]
    whole, _ = held["device"]
    share = 1.0 if context == "host" else 0.5
    # Three of four slices have run; the device's buffers are of all.
    assert held[context] == (whole * (1 - share), whole * min(share, 0.75))


CUTS: list[dict[str, Any]] = [
    {"schedule": "zb-h1", "recompute": "selective", "num_ranks": 3, "partition": [1, 2, 1]},
    {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "recompute": "full"},
    {"offload": 1.0, "recompute": 1},
    {"num_ranks": 4, "partition": [0, 3, 1, 0]},  # what crosses passes a stage that reads none of it
    {"slices": 1},
]


@pytest.mark.parametrize(
    ("settings", "name"), each_once(CUTS, ["deepseek_v32", "gemma3n_text", "glm_moe_dsa", "gemma4_text"], 1)
)
def test_wherever_it_is_cut(name: str, settings: dict[str, Any]) -> None:
    if "partition" in settings and name in CROSSING:  # of six layers
        first, second, *others = settings["partition"]
        settings = settings | {"partition": [first, second + 2, *others]}
    assert error_of(name, self_check=False, **settings) < BOUND


@pytest.mark.parametrize(
    ("name", "layers"),
    states(
        [
            pytest.param("qwen3_next", ["layers.0", "embed"]),
            pytest.param("gptj", ["h.0.", "wte"], marks=pytest.mark.more),
        ]
    ),
)
def test_frozen_layers_leave_the_other_gradients_alone(name: str, layers: list[str]) -> None:
    model = unsplit(name)
    for key, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in key for part in layers)
    assert error_of(name, model) < BOUND


@pytest.mark.parametrize(
    ("name", "slices"),
    states(
        [
            *each_once(["zaya", *STATES[:-1], "nemotron_h", "kimi_linear"], [SLICES, [LENGTH]], 1),
            *each_once(OWN_ATTENTION, [SLICES, [LENGTH]], 2),
            pytest.param("deepseek_v32", SLICES),
            pytest.param("gemma3n_text", SLICES, marks=pytest.mark.more),
        ]
    ),
)
def test_documents_are_separate_sequences(name: str, slices: list[int]) -> None:
    assert documents_error(unsplit(name), tokens(length=LENGTH), DOCUMENTS, slices=slices) < BOUND


@since("5.21")
def test_a_layer_that_carries_states_itself_is_recomputed_with_its_documents() -> None:
    """What a document leaves there is no input of the layer, so the next one can't be recomputed alone."""
    model, ids = unsplit("recurrent_gemma"), tokens(length=LENGTH)
    assert documents_error(model, ids, DOCUMENTS, slices=SLICES, recompute="full", self_check=False) < BOUND


@pytest.mark.parametrize("name", states([*first_of(["qwen3_next"]), *first_of(["mpt", "gpt_neo"])]))
def test_sequences_of_different_lengths(name: str) -> None:
    assert sequences_error(unsplit(name), [30, 7, 52, 1, 18], slices=3) < BOUND


@since("5.21")
@pytest.mark.parametrize(
    ("slices", "every"),
    [*first_of([([20, 1, 19], 6), ([17, 23], 2)], 0), *first_of([([40], 6), ([9, 31], 1)], 0, "grid")],
)
def test_rwkv_evaluates_as_in_evaluation_mode(slices: list[int], every: int) -> None:
    """There it halves hidden states every few layers, before norms whose epsilon stays."""
    config = copy.deepcopy(HYBRIDS["rwkv"])
    config.num_hidden_layers, config.rescale_every = 13 if every == 6 else 5, every
    model, inputs = build(config).train(), tokens(length=40)
    evaluated = copy.deepcopy(model).eval()
    with no_rounding_inside(), torch.no_grad():
        expected = causal_cross_entropy(evaluated(input_ids=inputs).logits[:, :-1], inputs[:, 1:])
    pipe = Pipeline(copy.deepcopy(model), slices=slices, num_ranks=2, schedule="1f1b")
    for _ in range(2):  # a step changes nothing
        with no_rounding_inside():
            assert float(pipe.evaluate(inputs, inputs)) == pytest.approx(float(expected[0] / expected[1]), rel=1e-12)
            pipe.step(inputs, inputs)
            unsplit_step(model, inputs, inputs)
    assert gradient_error(model, pipe) < BOUND


@pytest.mark.more
@since("5.21")
def test_costs_are_counted_and_measured_while_it_trains() -> None:
    config = HYBRIDS["qwen3_5_text"]
    assert len(count_model(config, LENGTH).layers) == 2
    settings: dict[str, Any] = {"schedule": "auto", "slices": "auto", "seq_len": LENGTH, "num_ranks": 2}
    pipe, inputs = Pipeline.from_config(config, num_microbatches=2, **settings), tokens(length=LENGTH)
    losses = [pipe.step(inputs, inputs) for _ in range(4)]
    assert max(losses) - min(losses) < 1e-5 * max(losses)


@since("5.21")
@pytest.mark.parametrize("name", first_of(["mamba", "mamba2"]))
def test_a_residual_in_float32_goes_to_the_next_stage(name: str) -> None:
    """Mamba's residual connections stay float32 in bfloat16."""
    inputs, losses = tokens(length=LENGTH), []
    for ranks, partition in ((1, "auto"), (2, "auto"), (2, [0, HYBRIDS[name].num_hidden_layers])):
        settings = {"slices": SLICES, "num_ranks": ranks, "partition": partition, "dtype": torch.bfloat16}
        pipe = make_pipe(HYBRIDS[name], **settings)
        losses.append(pipe.step(inputs, inputs))
    assert losses[1] == losses[2] == losses[0]


def test_where_nothing_crosses_one_run_goes_beyond_the_first_layer() -> None:
    """A run of a deep model takes seconds, though nothing is computed."""
    model = shapes_model(llama())
    layers = list(model.model.layers)
    entered: list[int] = []
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: entered.append(number))
    found = find_layer_tensors(model, layers)
    assert (found.hidden.row_dim, found.hidden.token_dim, found.crossing) == (0, 1, ())
    assert entered == [*range(len(layers)), 0]


@pytest.mark.more
def test_what_is_not_counted_or_cut_is_refused() -> None:
    pipe = Pipeline(unsplit("gemma4_text"), slices=4, num_ranks=2, schedule="1f1b", memory=Memory(limit=1e9))
    inputs = tokens(length=LENGTH)
    with pytest.raises(SlipstreamError, match=r"take more than hidden states.*give no memory\.limit"):
        pipe.step(inputs, inputs)
    with pytest.raises(SlipstreamError, match="can't be cut inside layers: they take more than hidden states"):
        Pipeline(unsplit("gemma4_text"), slices=4, num_ranks=2, schedule="1f1b", partition=[2.5, 3.5])


def test_kernels_of_their_own_are_refused() -> None:
    config = copy.deepcopy(OWN_ATTENTION["bloom"])
    config._attn_implementation_internal = "flash_attention_2"  # as when it was loaded with that
    with pytest.raises(SlipstreamError, match=r"'flash_attention_2'.*Load it with attn_implementation='eager'"):
        find_anatomy(config)


def test_documents_are_exact_at_any_length() -> None:
    assert check_sliceable(OWN_ATTENTION["falcon, alibi"]).longest_packed == float("inf")
