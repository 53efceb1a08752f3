"""Rows become the tokens and labels that TRL's SFTTrainer makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.launch import Progress
from slipstream.train.config import SourceSection
from slipstream.train.data import train_tokenizer
from slipstream.train.data.chat_templates import ChatTemplate
from slipstream.train.data.open_source import OpenSource

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a fox"}]
TWICE = [*TURNS, {"role": "user", "content": "and this"}, {"role": "assistant", "content": "an owl"}]
TOKENS = {"input_ids": [5, 6, 7, 8, 9]}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "a text": ({"text": "what is it"}, {}, None),
    "a completion": ({"prompt": "what is", "completion": " it"}, {}, None),
    "a completion of messages": ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {}, None),
    "all of a completion": ({"prompt": "what is", "completion": " it"}, {"completion_only_loss": False}, "all"),
    "a token of both": ({"prompt": "wha", "completion": "t is it"}, {"completion_only_loss": False}, "all"),
    "the assistant's turns": ({"messages": TWICE}, {"assistant_only_loss": True}, None),
    "all of a conversation": ({"messages": TWICE}, {}, "all"),
    "tokens": (TOKENS, {}, None),
    "tokens with labels": (TOKENS | {"labels": [-100, 6, -100, 8, 9]}, {}, None),
    "tokens of a completion": (TOKENS | {"completion_mask": [0, 0, 1, 1, 0]}, {"completion_only_loss": True}, None),
    "tokens of an assistant": (TOKENS | {"assistant_masks": [0, 1, 1, 0, 1]}, {}, None),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(["what is it", "a fox", "and this", "an owl"] * 3, 290, Progress(None), ["<pad>"])
    made.pad_token, made.chat_template = "<pad>", TEMPLATE
    return made


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300, bos_token_id=None, eos_token_id=0, pad_token_id=1))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_trls(name: str, tokenizer: Any, model: LlamaForCausalLM, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    row, options, loss = ROWS[name]
    common = {"report_to": "none", "use_cpu": True, "bf16": False, "activation_checkpointing": False}
    settings = {"output_dir": str(tmp_path), **common, **options}
    data = Dataset.from_list([row])
    trainer = trl.SFTTrainer(model, args=trl.SFTConfig(**settings), train_dataset=data, processing_class=tokenizer)
    theirs = trainer.data_collator([trainer.train_dataset[0]])
    data.to_json(tmp_path / "rows.jsonl")
    source = OpenSource.of(SourceSection(dataset=str(tmp_path / "rows.jsonl"), loss=loss), pytest.fail)
    template = ChatTemplate(tokenizer) if source.has_messages else None
    ours = source.tokenise(tokenizer, template, 99, Progress(None))
    assert ours.document(0).tolist() == theirs["input_ids"][0].tolist()
    assert ours.labels_of(0).tolist() == theirs["labels"][0].tolist()
