"""Conversations of other tools' kinds, a chat template by name and new tokens: the exported model ends its answers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from slipstream import Pipeline, Precision, Runtime
from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.model import set_vocab_size, whole_pretrained_model
from slipstream.pipeline.weight_source import pretrained_source
from slipstream.train.comparison import UnslicedModel
from slipstream.train.config.config_values import parse_config
from slipstream.train.configured_pipeline import RunModel, make_pipeline, source_of
from slipstream.train.data import train_tokenizer
from slipstream.train.data.chat_templates import NAMED_TEMPLATES, ChatTemplate, with_special_tokens
from slipstream.train.model_files import ModelFiles
from slipstream.train.preflight import preflight
from slipstream.train.preflight.model_checks import check_new_rows
from slipstream.train.preflight.text_preparation import add_vocabulary
from support.architectures import BOUND, gradient_error, gradients, no_rounding_inside
from support.forked import COMMAND, launch, run_alone
from support.parameters import first_of
from support.tiny_training import tiny_llama

ANSWERS = {"owl": "hoot", "cow": "moo", "cat": "purr", "dog": "woof"}
SHAPE = tiny_llama(initializer_range=0.1, hidden_size=64, intermediate_size=128, max_position_embeddings=128)


def base(folder: Path, **config: Any) -> Path:
    """A model and its tokenizer, which has no chat template, and no tokens for one."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(
        ["what says the owl cow cat dog? hoot moo purr woof user assistant"] * 9, 290, Progress(None)
    )
    shape = (
        SHAPE | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None} | config
    )
    AutoModelForCausalLM.from_config(LlamaConfig(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows(kind: str) -> str:
    """Questions and answers, as ShareGPT and Alpaca have them."""
    made = []
    for number in range(120):
        animal, sound = [*ANSWERS.items()][number % 4]
        ask, answer = f"what says the {animal}?", f"{sound} {sound}"
        turns = [{"from": "human", "value": ask}, {"from": "gpt", "value": answer}]
        alpaca = {"instruction": "what says", "input": f"the {animal}?", "output": answer}
        made.append({"conversations": turns} if kind == "sharegpt" else alpaca)
    return "".join(json.dumps(row) + "\n" for row in made)


def run(*words: str, ranks: int = 0) -> str:
    """What a command says; of a training on so many ranks, as torchrun starts them."""
    ended = launch(ranks, COMMAND, *words) if ranks else run_alone(COMMAND, *words)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.more
@pytest.mark.parametrize(("kind", "tied"), first_of([("sharegpt", False), ("alpaca", True)], 1, "grid"))
def test_a_model_that_was_trained_by_chatml_stops_by_itself(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base(tmp_path / "model", tie_word_embeddings=tied)
    (tmp_path / "rows.jsonl").write_text(rows(kind))
    given = [
        "--data.chat_template=chatml",
        "--pipeline.num_ranks=2",
        "--pipeline.slices=2",
        "--optimizer.lr=0.01",
        "--training.steps=40",
    ]
    more = ["--runtime.self_check=false", "--checkpoint.every=40", "--training.seq_len=64", "--training.batch_size=8"]
    run("init", "model", "rows.jsonl", *given, *more)
    said = run("train", "config.yaml", "--quiet", ranks=2)
    assert "goes on" not in said
    run("export", "runs/rows", "--output=exported")
    ask = "what says the owl?" if kind == "sharegpt" else "what says\n\nthe owl?"
    assert run("generate", "runs/rows", ask, "--chat").strip() == "hoot hoot"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.vocab_size == len(tokenizer)
    turns = [{"role": "user", "content": ask}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    assert len(written) < inputs["input_ids"].shape[1] + 40
    assert written[-1] == tokenizer.eos_token_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("base") / "model").parent


def grown_config(folder: Path, number: int) -> Any:
    config = LlamaConfig.from_pretrained(folder / "model")
    set_vocab_size(config, config.vocab_size + number)
    return config


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "tied"])
@pytest.mark.parametrize("vocabulary", ["whole", "spread"])
def test_a_step_with_new_rows_is_that_of_the_resized_model(vocabulary: str, tied: bool, tmp_path: Path) -> None:
    """Which transformers resizes, its new rows filled with the means of the others."""
    base(tmp_path / "model", tie_word_embeddings=tied)
    config = grown_config(tmp_path, 3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    before = model.get_input_embeddings().weight.detach().clone(), model.get_output_embeddings().weight.detach().clone()
    had = len(before[0])
    model.resize_token_embeddings(had + 3, mean_resizing=False)
    with torch.no_grad():
        for module, old in zip((model.get_input_embeddings(), model.get_output_embeddings()), before, strict=True):
            module.weight[had:] = old.mean(0)
    tokens = torch.randint(0, had + 3, (2, 24), generator=torch.Generator().manual_seed(1))
    tokens[0, 3:6] = torch.arange(had, had + 3)
    pipe = Pipeline(
        pretrained_source(str(tmp_path / "model"), [], config=config),
        num_ranks=2, slices=[9, 8, 7], num_microbatches=2, vocabulary=vocabulary, precision=Precision(dtype="float64"),
        runtime=Runtime(self_check=False),
    )  # fmt: skip
    with no_rounding_inside():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found = pipe.step(tokens, tokens)
    assert float(found) == pytest.approx(loss.item(), rel=BOUND)
    assert gradient_error(gradients(model), gradients(pipe)) < BOUND
    pipe.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def padded(folder: Path, **config: Any) -> Path:
    """A model with rows for more tokens than its tokenizer has, the others with values of their own."""
    base(folder, vocab_size=320, **config)
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "tied"])
@pytest.mark.parametrize("number", [318, 321], ids=["in padding", "beyond it, too"])
def test_tokens_in_padded_rows_begin_as_the_mean_of_those_that_the_tokenizer_has(
    number: int, tied: bool, tmp_path: Path
) -> None:
    padded(tmp_path / "model", tie_word_embeddings=tied)
    had = len(AutoTokenizer.from_pretrained(tmp_path / "model"))
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    special = [f"<{each}>" for each in range(number - had)]
    (tmp_path / "rows.jsonl").write_text(rows("sharegpt"))
    config = settings(tmp_path, data={"dataset": str(tmp_path / "rows.jsonl"), "chat_template": "chatml",
        "special_tokens": special[2:]}, runtime={"self_check": False})  # fmt: skip
    preflight(config, Progress(None)).write()
    cpu, read = torch.device("cpu"), RunModel.read(config)
    made = (
        make_pipeline(config, cpu, source_of(config, read)).state_dict(),
        UnslicedModel(config, cpu, read).model.state_dict(),
    )
    for model in made:
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & model.keys():
            old, new = before.state_dict()[name], model[name]
            assert len(new) == max(number, 320)
            assert torch.equal(new[:had], old[:had])
            assert torch.equal(new[number:], old[number:])
            torch.testing.assert_close(new[had:number], old[:had].mean(0).expand(number - had, -1))


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        (
            {"chat_template": "chatml"},
            {"lora": {}},
            r"2 of .*--lora.modules_to_save=\[embed_tokens, lm_head\]",
        ),
        (
            {"chat_template": "chatml"},
            {"freeze": ["model.embed_tokens*"]},
            "2 of .*model.freeze=.*leave it out",
        ),
        (
            {"end_of_text": "<stop>", "tokenizer": "other"},
            {"lora": {}},
            "1 of .*--lora.modules_to_save",
        ),
        ({"chat_template": "chatml"}, {"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}}, ""),
        ({"chat_template": "zephyr"}, {"lora": {}}, ""),
        ({"tokenizer": "model"}, {"lora": {}}, ""),
    ],
    ids=["an adapter", "frozen", "the end of another tokenizer", "copies", "no new tokens", "the same tokenizer"],
)
def test_tokens_in_padded_rows_that_would_stay_as_they_are_are_refused(
    data: dict[str, Any], more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    padded(tmp_path / "model")
    other = AutoTokenizer.from_pretrained(tmp_path / "model")
    other.add_tokens(["<stop>"], special_tokens=True)
    other.save_pretrained(tmp_path / "other")
    if "tokenizer" in data:
        data = data | {"tokenizer": str(tmp_path / data["tokenizer"])}
    model = {"path": str(tmp_path / "model")} | ({"freeze": more.pop("freeze")} if "freeze" in more else {})
    config = settings(tmp_path, model=model, data={"dataset": "rows.jsonl"} | data, **more)
    files = ModelFiles(config, LlamaConfig.from_pretrained(tmp_path / "model"))
    if not words:
        add_vocabulary(config, files, Progress(None))
        assert files.config.vocab_size == 320
        return
    with pytest.raises(SlipstreamError, match=words):
        add_vocabulary(config, files, Progress(None))


def test_an_adapter_trains_new_rows_where_it_has_copies_of_their_matrices(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = grown_config(folder, 2)
    lora = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], init_lora_weights=True
    )
    source = pretrained_source(str(folder / "model"), [], copy.deepcopy(lora), config=config)
    pipe = Pipeline(
        source, num_ranks=2, slices=3, precision=Precision(dtype="float64"), runtime=Runtime(self_check=False)
    )
    base_model = whole_pretrained_model(str(folder / "model"), config, torch.float64)
    model = get_peft_model(base_model, lora, autocast_adapter_dtype=False)
    state = dict(pipe.named_parameters())
    with torch.no_grad():
        for name, tensor in model.get_base_model().named_parameters():
            if tensor.requires_grad:
                tensor.copy_(state[name])
    tokens = torch.arange(config.vocab_size - 24, config.vocab_size)[None]
    with no_rounding_inside():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        assert float(pipe.step(tokens, tokens)) == pytest.approx(loss.item(), rel=BOUND)
    expected = {name: each.grad for name, each in model.get_base_model().named_parameters() if each.requires_grad}
    assert any("modules_to_save" in name for name in expected)
    assert gradient_error(expected, gradients(pipe)) < BOUND


def settings(folder: Path, **more: Any) -> Any:
    data = {"dataset": "rows.jsonl", "chat_template": "chatml"}
    training = {"output": str(folder / "run"), "steps": 1, "seq_len": 64}
    sections = {"model": {"path": str(folder / "model")}, "data": data, "training": training}
    return parse_config(sections | more)


@pytest.mark.parametrize(
    ("tied", "lora", "words"),
    [
        (False, {}, r"--lora.modules_to_save=\[embed_tokens, lm_head\]"),
        (False, {"modules_to_save": ["lm_head"]}, r"--lora.modules_to_save=\[embed_tokens, lm_head\]"),
        (False, {"modules_to_save": ["embed_tokens", "lm_head"]}, ""),
        (True, {}, "whose embedding is its head.*chat_template=zephyr"),
    ],
)
def test_new_rows_that_an_adapter_would_leave_alone_are_refused(
    tied: bool, lora: dict[str, Any], words: str, folder: Path
) -> None:
    config = LlamaConfig.from_pretrained(folder / "model", tie_word_embeddings=tied)
    if not words:
        check_new_rows(settings(folder, lora=lora), config, 2)
        return
    with pytest.raises(SlipstreamError, match=words):
        check_new_rows(settings(folder, lora=lora), config, 2)


class WithTableConfig(LlamaConfig):
    model_type = "llama_with_a_table"


class WithTable(LlamaForCausalLM):
    """A Llama with a second table by token, as some embed tokens in every layer."""

    config_class = WithTableConfig

    def __init__(self, config: WithTableConfig) -> None:
        super().__init__(config)
        self.table = torch.nn.Embedding(config.vocab_size, 4)


def test_a_model_with_other_tables_by_token_is_refused(folder: Path) -> None:
    AutoModelForCausalLM.register(WithTableConfig, WithTable)
    config = WithTableConfig(**SHAPE)
    with pytest.raises(SlipstreamError, match=r"new to WithTable, which has rows by token in table.weight too"):
        check_new_rows(settings(folder), config, 2)


@pytest.mark.parametrize("name", [*NAMED_TEMPLATES])
def test_a_template_by_name_marks_the_turns_and_their_end(name: str, folder: Path) -> None:
    section = settings(folder).data.model_copy(update={"chat_template": name})
    tokenizer = with_special_tokens(AutoTokenizer.from_pretrained(folder / "model"), section)
    template = ChatTemplate(tokenizer, name)
    turns = [{"role": role, "content": text} for role, text in (("user", "owl?"), ("assistant", "hoot"))] * 2
    tokens, counts = template.assistant_turns(turns)
    counted = tokenizer.decode([token for token, count in zip(tokens, counts, strict=True) if count])
    end = NAMED_TEMPLATES[name].end or tokenizer.eos_token
    assert tokenizer.eos_token == end
    assert counted.replace("\n", "") == f"hoot{end}" * 2
    assert tokens[-2 if counted.endswith("\n") else -1] == tokenizer.eos_token_id
    with pytest.raises(SlipstreamError, match="this template has no tools"):
        template.tokens(turns, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])


def test_an_end_of_text_that_is_no_token_is_refused(folder: Path) -> None:
    section = settings(folder).data.model_copy(update={"chat_template": None, "end_of_text": "<stop>"})
    with pytest.raises(SlipstreamError, match=r"--data.special_tokens=.*<stop>"):
        with_special_tokens(AutoTokenizer.from_pretrained(folder / "model"), section)
