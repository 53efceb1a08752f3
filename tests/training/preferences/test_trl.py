"""Tokens, loss and gradients of pairs are those of TRL's trainer, where it is installed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream import Pipeline, Runtime
from slipstream.training.config import PreferenceSection, SourceSection
from slipstream.training.data import sequences_of
from slipstream.training.data.samples import SampleReader
from slipstream.training.preferences import PairReader, preference_loss, read_pairs
from support.architectures import gradient_error, gradients, no_rounding_inside

ROWS = [
    {"prompt": "say a", "chosen": " a b c", "rejected": " c"},
    {"prompt": "say b b b", "chosen": " b", "rejected": " a a a a a"},
    {"prompt": "say", "chosen": " c a", "rejected": " b a"},
    {"prompt": "say c", "chosen": " c c c c", "rejected": " a c c b"},
]
BOUND = 1e-5  # TRL sums the products with the head's weights in float32, whatever the model's dtype
WORDS = ["<end>", "<pad>", "say", "a", "b", "c"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=len(WORDS), initializer_range=0.2, attn_implementation="eager")
    return LlamaForCausalLM(config).double()


def test_a_step_is_trls(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    model, before = llama(0), llama(1)
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path), beta=0.3, report_to="none", use_cpu=True, bf16=False, activation_checkpointing=False
    )
    theirs = trl.DPOTrainer(
        copy.deepcopy(model),
        ref_model=copy.deepcopy(before),
        args=arguments,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )
    inputs = theirs.data_collator([*theirs.train_dataset])
    loss = theirs.compute_loss(theirs.model, inputs)
    loss.backward()
    reader = SampleReader(SourceSection(dataset="pairs"), "prompt-completion", "completion", tokenizer, None)
    text = read_pairs(ROWS, PairReader(reader, 32), "pairs", print)
    tokens = [text.document(document).tolist() for document in range(text.num_documents)]
    kept = [ids[mask == 1].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    assert tokens[::2] + tokens[1::2] == kept
    options = {"num_ranks": 2, "slices": 2, "num_microbatches": 2, "runtime": Runtime(self_check=False)}
    function = preference_loss(PreferenceSection(beta=0.3))
    batch = sequences_of([text], "none", 32, None).batch(0, len(ROWS))
    with no_rounding_inside():
        reference = Pipeline(before, loss_fn=function, **options)
        reference.evaluate(
            batch.input_ids, batch.labels, sequence_values=torch.zeros(2 * len(ROWS), dtype=torch.float64)
        )
        text = replace(text, values=reference.sequence_log_probabilities().numpy())
        batch = sequences_of([text], "none", 32, None).batch(0, len(ROWS))
        pipe = Pipeline(model, loss_fn=function, **options)
        found = pipe.step(batch.input_ids, batch.labels, sequence_values=batch.sequence_values)
    assert abs(float(found) - loss.item()) < BOUND
    assert gradient_error(gradients(theirs.model.named_parameters()), gradients(pipe.named_parameters())) < BOUND
