"""Layers that take their positions from the cache's length are exact, and those that keep more in it are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    Llama4TextConfig,
    MambaConfig,
    MiniMaxM3VLTextConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from slipstream import Pipeline, Runtime, SlipstreamError
from slipstream.model import check_sliceable
from support.architectures import BOUND, VOCABULARY, llama, tokens
from support.exact_steps import document_ids, documents_error, step_error
from support.pipelines import make_pipe
from support.versions import counts_within_documents, since

LENGTH = 96
SLICES = [5, 1, 46, 44]  # the second alone in its slice, the third across position 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def llama4(floor_scale: int = 64) -> Llama4TextConfig:
    return Llama4TextConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        attention_chunk_size=16,
        attn_temperature_tuning=True,
        floor_scale=floor_scale,
    )


def bart() -> BartConfig:
    return BartConfig(
        is_decoder=True,
        vocab_size=VOCABULARY,
        d_model=32,
        decoder_layers=4,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=LENGTH,
        dropout=0.0,
    )


def unsplit(config: PretrainedConfig) -> PreTrainedModel:
    """The model in float64 with its own attention, under the name by which its own code knows it."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


@pytest.mark.parametrize("config", [llama4(), bart()], ids=["llama4_text", "bart"])
def test_positions_from_the_caches_length_are_exact(config: PretrainedConfig) -> None:
    assert step_error(unsplit(config), tokens(length=LENGTH), slices=SLICES) < BOUND


@counts_within_documents
def test_documents_are_refused_where_positions_would_run_on() -> None:
    inputs = tokens(length=64)
    pipe = Pipeline(unsplit(llama4()), slices=4, num_ranks=2, schedule="1f1b")
    with pytest.raises(SlipstreamError, match=r"'llama4_text' counts positions.*of more than 63 tokens"):
        pipe.step(inputs, inputs, document_ids=document_ids(*[(30, 34)] * 2))
    pipe = Pipeline(unsplit(bart()), slices=4, num_ranks=2, schedule="1f1b")
    with pytest.raises(SlipstreamError, match="'bart' counts positions from the sequence's start"):
        pipe.step(inputs[:, :20], inputs[:, :20], document_ids=document_ids(*[(8, 12)] * 2))


@counts_within_documents
def test_documents_below_the_scale_are_separate_sequences() -> None:
    assert documents_error(unsplit(llama4()), tokens(length=60), [(25, 35)] * 2, slices=[5, 30, 25]) < BOUND


_LAYERS = {"num_key_value_heads": 2, "head_dim": 16}
_STATES: dict[str, tuple[PretrainedConfig, str]] = {
    "minimax_m3": (
        MiniMaxM3VLTextConfig(
            **_SIZES, **_LAYERS, rotary_dim=8, layer_types=["full_attention", "minimax_m3_sparse"] * 2, index_n_heads=2
        ),
        "layer 1 carries an indexer's keys.*sparse attention",
    )
}


def test_other_code_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"slices": 4, "num_ranks": 2, "runtime": Runtime(self_check=False)}
    Pipeline.from_config(llama(), **options)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda self, hidden, **_: hidden + self.mlp(hidden.cumsum(1)))
    with pytest.raises(SlipstreamError, match=r"can't be trained in token slices: layer 0 \(LlamaDecoderLayer\)"):
        Pipeline.from_config(llama(), **options)


@pytest.mark.parametrize("self_check", [True, False], ids=["self-check", "no self-check"])
@pytest.mark.parametrize("name", _STATES)
def test_carried_state_is_refused_with_and_without_the_self_check(name: str, self_check: bool) -> None:
    config, reason = _STATES[name]
    with pytest.raises(SlipstreamError, match=f"can't be (trained in token slices|cut into stages): .*{reason}"):
        Pipeline.from_config(config, slices=4, num_ranks=2, schedule="1f1b", runtime=Runtime(self_check=self_check))


@since("5.21")
def test_a_recurrence_that_ignores_its_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of versions to come may."""
    monkeypatch.setattr("slipstream.model.causal_lm_stage.give_initial_states", lambda _: None)
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(SlipstreamError, match=r"MambaBlock.*carries a state.*doesn't continue from it over several"):
        make_pipe(config, slices=4)


@counts_within_documents
def test_the_self_check_says_up_to_which_length_documents_are_exact() -> None:
    assert check_sliceable(llama4(floor_scale=8192)).longest_packed == 8191
    assert check_sliceable(bart()).longest_packed == 0
