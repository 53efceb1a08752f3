"""Functions of a user's that transformers calls by names are what is trained, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.masking_utils import sdpa_mask

from slipstream import Pipeline, Precision, SlipstreamError
from slipstream.model import causal_cross_entropy
from slipstream.model.user_changes import compare_with_config
from support.architectures import ARCHITECTURES, llama, no_rounding_inside, tokens
from support.exact_steps import exact_pipe
from support.refusals import refused

MIXTRAL = ARCHITECTURES["mixtral"]


def sharper(module: nn.Module, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, None]:
    return sdpa_attention_forward(module, 1.3 * query, *others, **options)  # type: ignore[return-value]


def mixing_rows(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    output, _ = sdpa_attention_forward(*arguments, **options)
    return output + 0.1 * output.flip(0), None


def drawing(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    output, _ = sdpa_attention_forward(*arguments, **options)
    return output * (1 + torch.rand(())), None


def every_second_key(*arguments: Any, mask_function: Callable[..., Any], **options: Any) -> Any:
    def kept(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(batch, head, query, key) & ((query - key) % 2 == 0)

    return sdpa_mask(*arguments, mask_function=kept, **options | {"allow_is_causal_skip": False})


def experts(most: int, power: int) -> Callable[..., Tensor]:
    """Experts that take `most` tokens each, and weigh their outputs by a power of the router's weights."""

    def forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            rows, places = (each[:most] for each in torch.where(index == expert))
            gate, up = (hidden[rows] @ self.gate_up_proj[expert].T).chunk(2, -1)
            found = (self.act_fn(gate) * up) @ self.down_proj[expert].T
            output = output.index_add(0, rows, found * weights[rows, places, None] ** power)
        return output

    return forward


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The functions above in transformers' registries, which later tests find as they were."""
    kinds = AttentionInterface, AttentionMaskInterface, ExpertsInterface
    before = [dict(kind._global_mapping) for kind in kinds]
    for function in (sharper, mixing_rows, drawing):
        AttentionInterface.register(function.__name__, function)
    AttentionInterface.register("thinned", sdpa_attention_forward)
    AttentionMaskInterface.register("thinned", every_second_key)
    ExpertsInterface.register("squared", experts(most=1000, power=2))
    ExpertsInterface.register("full", experts(most=20, power=1))
    yield
    for kind, mapping in zip(kinds, before, strict=True):
        kind._global_mapping.clear()
        kind._global_mapping.update(mapping)


def made(config: PretrainedConfig, **names: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float64, **names)
    return model.train()  # type: ignore[no-any-return]


@pytest.mark.parametrize("settings", [{"slices": 1}, {"slices": 1, "num_microbatches": 2, "num_ranks": 1}])
@pytest.mark.parametrize("name", ["sharper", "thinned"])
def test_attention_of_ones_own_attends_to_whole_sequences(name: str, settings: dict[str, Any]) -> None:
    exact_pipe(made(llama(), attn_implementation=name), tokens(), **settings)


def test_attention_under_the_name_of_transformers_own_is_found() -> None:
    AttentionInterface.register("sdpa", sharper)
    exact_pipe(made(llama(), attn_implementation="sdpa"), tokens(), slices=1)
    with refused("attn_implementation='sdpa' is a function of your own in AttentionInterface .. slices=1"):
        Pipeline(made(llama(), attn_implementation="sdpa"), slices=4)


def test_attention_of_ones_own_is_that_of_a_configuration() -> None:
    AttentionInterface.register("sdpa", sharper)
    whole, ids = made(llama()), tokens()
    with no_rounding_inside():
        pipe = Pipeline.from_config(
            llama(), slices=1, num_ranks=2, schedule="1f1b", precision=Precision(dtype=torch.float64)
        )
        found = pipe.evaluate(ids, ids)
        with torch.no_grad():
            total, count = causal_cross_entropy(whole(input_ids=ids).logits[:, :-1], ids[:, 1:])
    assert float(found) == pytest.approx(float(total / count), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("sharper", {"slices": 4}, "attn_implementation='sharper' is a function of your own .. slices=1"),
        ("thinned", {"slices": 4}, "attn_implementation='thinned' is a function of your own in AttentionMaskInterface"),
        (
            "mixing_rows",
            {"slices": 1, "num_microbatches": 2},
            "'mixing_rows' .. computes a sequence alone in another way",
        ),
        ("drawing", {"slices": 1}, "'drawing' .. draws random numbers or keeps a state"),
    ],
)
def test_attention_that_slices_or_rows_do_not_have_is_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with refused(words):
        Pipeline(made(llama(), attn_implementation=name), **settings)


def test_documents_are_refused_with_attention_of_ones_own() -> None:
    pipe = Pipeline(made(llama(), attn_implementation="sharper"), slices=1)
    ids = tokens()
    with refused("attn_implementation='sharper' .. packed documents"):
        pipe.step(ids, ids, document_ids=torch.arange(ids.shape[1]).div(20, rounding_mode="floor").expand_as(ids))


def test_a_function_in_the_place_of_every_models_own_attention_is_refused() -> None:
    AttentionInterface.register("eager", sharper)
    with refused("AttentionInterface has a function of your own under 'eager' .. Register it under another name"):
        Pipeline(made(llama()), slices=1)


def test_experts_of_ones_own_are_sliced_where_each_token_is_alone() -> None:
    exact_pipe(made(MIXTRAL, experts_implementation="squared"), tokens(), slices=4, num_microbatches=2)
    exact_pipe(made(MIXTRAL, experts_implementation="full"), tokens(), slices=1)
    for settings, words in ({"slices": 4}, "slice"), ({"slices": 1, "num_microbatches": 2}, "sequence alone"):
        with refused(f"experts_implementation='full' is a function of your own in ExpertsInterface .. {words}"):
            Pipeline(made(MIXTRAL, experts_implementation="full"), **settings)


def squares(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    return logits.square().mean()


def with_loss(model: PreTrainedModel) -> PreTrainedModel:
    model.loss_function = squares
    return model


def with_loss_type() -> PretrainedConfig:
    config = llama()
    config.loss_type = "ForMaskedLM"
    return config


def test_a_loss_that_the_model_has_is_refused_by_its_name() -> None:
    with refused("the model's loss_function is squares .. loss_fn="):
        Pipeline(with_loss(made(llama())))
    for begin in (Pipeline.from_config, lambda config: Pipeline(made(config))):
        with refused("the model's loss_type='ForMaskedLM' is ForMaskedLMLoss .. loss_fn="):
            begin(with_loss_type())


def test_a_registered_loss_is_refused_and_a_given_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Pipeline(with_loss(made(llama())), loss_fn=causal_cross_entropy)
    model = with_loss(made(llama()))
    model.loss_function = ForCausalLMLoss
    Pipeline(model)
    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", squares)
    with refused("the model's loss_type='ForCausalLM' is squares"):
        Pipeline.from_config(llama())


def test_a_method_in_the_place_of_a_models_is_a_change() -> None:
    config = BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    model: Any = made(config)
    inner = model.transformer.build_alibi_tensor
    model.transformer.build_alibi_tensor = lambda *arguments: 2 * inner(*arguments)
    assert list(map(str, compare_with_config(model).changes)) == ["transformer has a build_alibi_tensor of its own"]
    with pytest.raises(SlipstreamError, match="build_alibi_tensor of its own, and contains all layers"):
        Pipeline(model, slices=1, num_ranks=2, schedule="1f1b")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_model_of_transformers_has_functions_of_a_user(name: str) -> None:
    assert not compare_with_config(made(ARCHITECTURES[name])).dispatched
