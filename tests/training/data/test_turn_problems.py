"""Before a run starts it says where a model wouldn't learn to end its turns, or would learn not to think."""

from __future__ import annotations

import json
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import LlamaConfig

from slipstream.cli import main
from slipstream.launch import Progress
from slipstream.train.config import Config, ModelSection
from slipstream.train.config.config_values import dump_config, parse_config
from slipstream.train.data import train_tokenizer
from slipstream.train.model_files import ModelFiles
from slipstream.train.preflight.text_preparation import check_turns, prepare_text
from support.parameters import first_of
from support.tiny_training import tiny_llama

END = "no turn that counts ends with a special or added token in the first"
THOUGHTS = "an empty <think> block counts in"
FRAME = (
    "{% for message in messages %}<{{ message.role }}>\n{% if message.role == 'assistant' %}ANSWER"
    "{% else %}{{ message.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\nPROMPT{% endif %}"
)
ENDED = "{{ message.content }}{{ eos_token }}"
MARKED = "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
QUESTION, ANSWER, OTHER = (
    {"role": role, "content": text} for role, text in [("user", "say"), ("assistant", "owl"), ("assistant", "fox")]
)
CONVERSATIONS = [{"messages": [QUESTION, ANSWER, QUESTION, OTHER]}] * 3
PAIRS = [{"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [OTHER]}] * 3


@cache
def tokenizer() -> Any:
    return train_tokenizer(["<user> <assistant> <think> </think> say owl"] * 3, 290, Progress(None))


def configured(
    folder: Path, answer: str, rows: list[dict[str, Any]] = CONVERSATIONS, prompt: str = "", **more: Any
) -> Config:
    """A run on these rows, whose assistant's turns the chat template writes as `answer`."""
    tokenizer().save_pretrained(folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chat.jinja").write_text(FRAME.replace("ANSWER", answer).replace("PROMPT", prompt))
    given = {"dataset": str(folder / "rows.jsonl"), "tokenizer": str(folder), "validation_fraction": 0}
    given |= {"chat_template": str(folder / "chat.jinja"), **more.pop("data", {})}
    training = {"output": str(folder / "run"), "steps": 1, "seq_len": 64, **more.pop("training", {})}
    return parse_config({"model": {"config": tiny_llama()}, "data": given, "training": training, **more})


def warnings(*given: Any, **more: Any) -> list[str]:
    """What the preparation of a run's data warns of."""
    config = configured(*given, **more)
    said: list[str] = []
    progress = Progress(Console(file=StringIO()))
    progress.warn = said.append  # type: ignore[method-assign]
    prepare_text(config, ModelFiles(config, LlamaConfig(vocab_size=300)), progress)
    return said


@pytest.mark.parametrize(
    "answer",
    [ENDED, MARKED, "{{ message.content }}<|endoftext|>\n"],
    ids=["by prefixes", "by generation tags", "as text, and a line break"],
)
def test_turns_with_an_end(answer: str, tmp_path: Path) -> None:
    assert warnings(tmp_path, answer) == []


CHATML = {"chat_template": "chatml"}


@pytest.mark.parametrize(
    ("data", "is_said"),
    [
        ({}, True),
        ({"end_of_text": "<|im_end|>"}, False),
        (CHATML, False),
        (CHATML | {"end_of_text": "<|endoftext|>"}, True),
    ],
    ids=["another", "made the same", "by name", "by name, but another"],
)
def test_turns_whose_end_isnt_that_of_text(data: dict[str, Any], is_said: bool, tmp_path: Path) -> None:
    more = {"special_tokens": ["<|im_start|>", "<|im_end|>"], **data}
    config = configured(tmp_path, "{{ message.content }}<|im_end|>", data=more)
    config = config.model_copy(update={"model": ModelSection(config=tiny_llama(vocab_size=400))})
    for found in (
        warnings(tmp_path, "{{ message.content }}<|im_end|>", data=more),
        check_turns(config, ModelFiles(config)),
    ):
        assert found is not None
        assert len(found) == is_said
        if is_said:
            assert "end with <|im_end|>, but the tokenizer's end of text is <|endoftext|>" in found[0]
            assert "--data.end_of_text='<|im_end|>'" in found[0]


@pytest.mark.parametrize(
    "answer",
    [
        "{{ message.content }}",
        "{{ message.content }}</s>",  # which is no token of this tokenizer
        "{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}",
        "{% generation %}{{ eos_token }}{{ message.content }}{% endgeneration %}",
    ],
    ids=["none", "text", "after what counts", "before it"],
)
def test_turns_without_an_end(answer: str, tmp_path: Path) -> None:
    (said,) = warnings(tmp_path, answer)
    assert said.startswith(f"{END} 3 conversations")
    assert "close the assistant's turns with {{ eos_token }} (<|endoftext|>), before {% endgeneration %}" in said
    assert said.endswith("--data.chat_template=chat.jinja")


def test_what_is_cut_off_has_no_end_of_its_own(tmp_path: Path) -> None:
    assert warnings(tmp_path, MARKED, [{"messages": [QUESTION, ANSWER]}], training={"seq_len": 20}) == []
    long = [{"messages": [QUESTION, ANSWER | {"content": "owl " * 90}]}]
    assert [each for each in warnings(tmp_path, MARKED, long) if END in each] == []


@pytest.mark.parametrize(
    ("answer", "prompt", "warns"),
    [
        ("<think>\n\n</think>\n\n" + ENDED, "", True),
        ("<think></think>" + ENDED, "", True),
        ("<think>\n\n</think>\n\n" + ENDED, "<think>\n", True),  # of which the end counts
        ("<think>\n\n</think>\n\n" + ENDED, "<think>\n\n</think>\n\n", False),
        ("<think>\n\n</think>\n\n" + MARKED, "", False),
        ("<think>\nhm\n</think>\n\n" + ENDED, "", False),
    ],
    ids=["counts", "without a line", "begins in the header", "in the header", "before the tag", "a thought"],
)
def test_empty_thoughts(answer: str, prompt: str, warns: bool, tmp_path: Path) -> None:
    said = warnings(tmp_path, answer, prompt=prompt)
    assert [each.partition(" 3 of the first 3 conversations")[0] for each in said] == [THOUGHTS] * warns
    assert all(each.endswith("--data.chat_template=chat.jinja") for each in said)


ROWS = {"dataset": "HERE/rows.jsonl", "weight": 1}


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (CONVERSATIONS, {"data": {"loss": "completion"}}),
        (CONVERSATIONS, {"data": {"loss": "all"}}),
        (PAIRS, {"preference": {}}),
        (CONVERSATIONS, {"data": {"streaming": True}}),
        (CONVERSATIONS, {"data": {"dataset": None, "sources": [ROWS, ROWS], "streaming": True}}),
    ],
    ids=["completions", "all", "pairs of answers", "a stream", "several streams"],
)
def test_whatever_counts_is_looked_at(rows: list[dict[str, Any]], more: dict[str, Any], tmp_path: Path) -> None:
    """Of several streams, each warning comes once."""
    more = json.loads(json.dumps(more).replace("HERE", str(tmp_path)))
    found = warnings(tmp_path, "<think></think>{{ message.content }}", rows, **more)
    assert [each[:20] for each in found] == [END[:20], THOUGHTS[:20]]
    assert warnings(tmp_path, ENDED, rows, **more) == []


@pytest.mark.parametrize("rows", first_of([CONVERSATIONS, PAIRS]), ids=["conversations", "pairs"])
def test_a_check_of_the_configuration_says_the_same(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"preference": {}} if rows is PAIRS else {}

    def checked(answer: str, exit_code: int = 0, what: str = "turns", **changes: Any) -> list[str]:
        (tmp_path / "config.yaml").write_text(dump_config(configured(tmp_path, answer, rows, **more, **changes)))
        monkeypatch.setattr("sys.argv", ["slipstream", "check", str(tmp_path / "config.yaml")])
        with pytest.raises(SystemExit) as ending:
            main()
        assert ending.value.code == exit_code
        lines = capsys.readouterr().out.splitlines()
        return [line.split(maxsplit=1)[1].rstrip() for line in lines if line.startswith(f"{what} ")]

    found = checked("<think></think>{{ message.content }}")
    assert [each[:20] for each in found] == [END[:20], THOUGHTS[:20]]
    assert checked(ENDED) == ["those that count have an end, and none has an empty <think> block"]
    (said,) = checked(ENDED, data={"dataset": str(tmp_path / "missing.jsonl")})
    assert said.startswith("not checked: ")
    (said,) = checked(ENDED, exit_code=1, what="tokenizer", data={"tokenizer": str(tmp_path / "run")})
    assert said.startswith("no tokenizer at ")


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_and_texts_are_left_alone(streams: bool, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}] * 3
    assert warnings(tmp_path, "", rows, data={"streaming": streams}) == []
    config = configured(tmp_path, "", rows)
    assert check_turns(config, ModelFiles(config)) is None
    assert warnings(tmp_path, "", [{"text": "<think></think>"}] * 9, data={"streaming": streams}) == []


@pytest.mark.parametrize("kind", ["rated", "pairs"])
def test_the_first_rows_may_all_answer_one_prompt(kind: str, tmp_path: Path) -> None:
    """Of which alone KTO couldn't be trained."""
    answers = {"chosen": [ANSWER], "rejected": [OTHER]} if kind == "pairs" else {"completion": [ANSWER], "label": True}
    rows: list[dict[str, Any]] = [{"prompt": [QUESTION]} | answers] * 100
    config = configured(tmp_path, "{{ message.content }}", rows, preference={"loss": "kto"})
    found = check_turns(config, ModelFiles(config))
    assert found is not None
    assert found[0].startswith(END)
