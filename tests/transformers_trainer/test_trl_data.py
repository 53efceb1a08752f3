"""TRL's data sets and collators train a Pipeline to the losses of TRL's own trainers: masks, packing, preferences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

from slipstream import Pipeline, Runtime
from slipstream.errors import SlipstreamError
from slipstream.extras.hf_trainer import SlipstreamTrainer
from slipstream.extras.hf_trainer.trainer import rows_of_pairs
from slipstream.train.config import PreferenceSection
from slipstream.train.preferences import preference_loss

WORDS = ["<end>", "<pad>", "user", "assistant", "say", "a", "b", "c"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end> "
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


def conversation(number: int) -> dict[str, Any]:
    answer = " ".join("abc"[(number + word) % 3] for word in range(1 + number % 5))
    turns = [{"role": "user", "content": "say a b"}, {"role": "assistant", "content": answer}]
    return {"messages": turns * (1 + number % 2)}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}  # as the trainers would set them, and say so
    return LlamaForCausalLM(LlamaConfig(**sizes, **ids, vocab_size=len(WORDS), initializer_range=0.2)).double()


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}
PREFERENCE = PreferenceSection(beta=0.3)


def trainer_on_the_data_of(theirs: Any, pipe: Pipeline, folder: Path, **settings: Any) -> SlipstreamTrainer:
    return SlipstreamTrainer(
        pipe,
        TrainingArguments(output_dir=str(folder), remove_unused_columns=False, **COMMON | settings),
        train_dataset=theirs.train_dataset,
        eval_dataset=theirs.eval_dataset,
        data_collator=theirs.data_collator,
        processing_class=theirs.processing_class,
    )


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_run_has_the_losses_of_trls_trainer(packing: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    rows = {"per_device_train_batch_size": 2 if packing else 4}
    how = {"max_length": 32, "assistant_only_loss": True, "packing": packing, "activation_checkpointing": False}
    theirs = trl.SFTTrainer(
        llama(),
        args=trl.SFTConfig(output_dir=str(tmp_path / "trl"), **COMMON | rows | how),
        train_dataset=Dataset.from_list([conversation(number) for number in range(24)]),
        processing_class=tokenizer(),
    )
    pipe = Pipeline(llama(), num_ranks=2, schedule="1f1b", slices=3, runtime=Runtime(self_check=False))
    ours = trainer_on_the_data_of(theirs, pipe, tmp_path / "ours", **rows)
    expected = losses(theirs)
    assert expected[-1] < expected[0]
    assert losses(ours) == pytest.approx(expected, rel=1e-6)  # both log float32


def test_a_run_on_preferences_has_the_losses_of_trls_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    how = {"beta": PREFERENCE.beta, "precompute_ref_log_probs": True, "activation_checkpointing": False}
    theirs = trl.DPOTrainer(
        llama(),
        args=trl.DPOConfig(output_dir=str(tmp_path / "trl"), **COMMON | how),
        train_dataset=Dataset.from_list([pair(number) for number in range(24)]),
        eval_dataset=Dataset.from_list([pair(number) for number in range(24, 30)]),
        processing_class=tokenizer(),
    )
    loss = preference_loss(PREFERENCE)
    pipe = Pipeline(
        llama(),
        num_ranks=2,
        schedule="1f1b",
        slices=3,
        num_microbatches=2,
        loss_fn=loss,
        runtime=Runtime(self_check=False),
    )
    ours = trainer_on_the_data_of(theirs, pipe, tmp_path / "ours")
    expected = losses(theirs)
    assert expected[-1] < expected[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses(ours) == pytest.approx(expected, rel=1e-5)  # TRL multiplies with the head in float32
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


def pair(number: int) -> dict[str, str]:
    def answer(seed: int) -> str:
        return " ".join("abc"[(seed * word + number) % 3] for word in range(1, 2 + (number + seed) % 6))

    return {"prompt": "say a b", "chosen": f" {answer(1)}", "rejected": f" {answer(2)} c"}


def test_preferences_that_cannot_be_trained_are_refused_before_a_step(tmp_path: Path) -> None:
    keys = ("input_ids", "attention_mask", "completion_mask")
    with pytest.raises(SlipstreamError, match=r"without ref_chosen_logps.*precompute_ref_log_probs=True"):
        rows_of_pairs({key: torch.ones(4, 6, dtype=torch.int64) for key in keys})
    loss = preference_loss(PREFERENCE)
    pipe = Pipeline(llama(), slices=2, num_microbatches=2, loss_fn=loss, runtime=Runtime(self_check=False))
    settings = COMMON | {"per_device_train_batch_size": 2}
    for changes, said in (
        ({"gradient_accumulation_steps": 2}, r"per_device_train_batch_size=4, and Pipeline\(num_microbatches=4\)"),
        ({}, "the last batch of a loss of whole sequences may have fewer rows"),
    ):
        args = TrainingArguments(output_dir=str(tmp_path), **settings | changes)
        with pytest.raises(SlipstreamError, match=said):
            SlipstreamTrainer(pipe, args, train_dataset=[{}] * 5).train()


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        ("SFTConfig", {"packing": True}, "packing=True of SFTConfig, .* a TRL trainer that is made with it"),
        ("SFTConfig", {"max_length": 64}, "max_length=64 of SFTConfig"),
        (
            "SFTConfig",
            {"loss_type": "dft"},
            "loss_type='dft' of SFTConfig, .* or another loss_fn, and leave loss_type out",
        ),
        (
            "DPOConfig",
            {"beta": 0.3},
            r"beta=0.3 of DPOConfig, .*preference_loss\(slipstream.train.config.PreferenceSection",
        ),
        ("Seq2SeqTrainingArguments", {"predict_with_generate": True}, "give transformers.TrainingArguments"),
    ],
)
def test_arguments_of_other_trainers_are_refused(config: str, given: dict[str, Any], said: str, tmp_path: Path) -> None:
    pipe = Pipeline(llama(), slices=2, runtime=Runtime(self_check=False))
    kind = Seq2SeqTrainingArguments if config.startswith("Seq") else getattr(pytest.importorskip("trl"), config)
    usual = COMMON | {"activation_checkpointing": False}
    with pytest.raises(SlipstreamError, match=said):
        SlipstreamTrainer(pipe, kind(output_dir=str(tmp_path), **usual | given), train_dataset=[{}])
    SlipstreamTrainer(pipe, kind(output_dir=str(tmp_path), **usual), train_dataset=[{}])


def test_data_of_other_losses_is_refused(tmp_path: Path) -> None:
    ids = torch.ones(4, 6, dtype=torch.int64)
    rated = {"input_ids": ids, "attention_mask": ids, "completion_mask": ids, "label": ids[:, 0] > 0}
    with pytest.raises(SlipstreamError, match=r"a batch of rated answers \(KTO\).* --preference.loss=kto"):
        rows_of_pairs(rated)
    loss = preference_loss(PREFERENCE)
    pipe = Pipeline(llama(), slices=2, num_microbatches=2, loss_fn=loss, runtime=Runtime(self_check=False))
    with pytest.raises(SlipstreamError, match=r"takes sequence_values, which aren't given"):
        pipe.step({"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cu_seq_lens_q", torch.tensor([0, 3, 8])),
        ("max_length_k", 5),
        ("seq_idx", torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])),
    ],
)
def test_documents_that_are_said_otherwise_than_by_positions_are_refused(key: str, value: Any) -> None:
    pipe = Pipeline(llama(), num_ranks=2, schedule="1f1b", slices=2, runtime=Runtime(self_check=False))
    ids = torch.arange(8)[None] % len(WORDS)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
    assert torch.isfinite(pipe.evaluate({**batch, "cu_seq_lens_q": torch.tensor([0, 4, 8]), "max_length_q": 4}))
    with pytest.raises(
        SlipstreamError, match=f"batch.'{key}'. and batch.'position_ids'. disagree on where documents start"
    ):
        pipe.evaluate({**batch, key: value})
    with pytest.raises(SlipstreamError, match=f"the batch has '{key}'"):
        pipe.evaluate({"input_ids": ids, "labels": ids, key: value})
