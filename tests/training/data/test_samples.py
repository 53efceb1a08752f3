"""Rows become tokens of which the right ones count, and what can't be trained on is counted or named."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import SampleSection, SourceSection
from slipstream.train.data import TokenisedText, train_tokenizer
from slipstream.train.data.open_source import OpenSource
from slipstream.train.data.samples import ChatTemplate, show_example
from slipstream.train.data.streams import RowStream
from slipstream.train.export import TextWriter
from slipstream.train.preflight.text_preparation import check_sample

CHAT = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}OPEN{{ message.content }}"
    "{{ eos_token }}CLOSE{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = CHAT.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}")
PLAIN = CHAT.replace("OPEN", "").replace("CLOSE", "")
LAST_ONLY = PLAIN.replace("{{ message.content }}{{ eos", "{% if loop.last %}!{% endif %}{{ message.content }}{{ eos", 1)
MERGING = PLAIN.replace("<{{ message.role }}>", "{{ message.role }} ").replace("<assistant>", "assistant ")
NOTHING = "holds no sample to train on: left out 1 of 1 samples: 1 in which no "
END = "<|endoftext|>"
WHOLE = f"<user>what is it<assistant>a fox{END}<user>and this<assistant>an owl{END}"
TURNS = [
    {"role": "user", "content": "what is it"},
    {"role": "assistant", "content": "a fox"},
    {"role": "user", "content": "and this"},
    {"role": "assistant", "content": "an owl"},
]

Tokenise = Callable[..., TokenisedText]

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["what is it", "a fox", "and this", "an owl", "<user> <assistant>"] * 3, 290, Progress(None))


@pytest.fixture
def tokenise(tmp_path: Path, tokenizer: Any) -> Tokenise:
    """Writes rows to a file and tokenises it as a run does."""

    def run(
        rows: list[dict[str, Any]], template: str = PLAIN, seq_len: int = 200, say: Any = pytest.fail, **more: Any
    ) -> TokenisedText:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = OpenSource.of(SourceSection(dataset=str(file), **more), say)
        tokenizer.chat_template = template
        progress = Progress(None)
        progress.warn = say  # type: ignore[method-assign]
        return source.tokenise(tokenizer, ChatTemplate(tokenizer) if source.has_messages else None, seq_len, progress)

    return run


def with_begin_token() -> Any:
    """A tokenizer that begins every text with <s>."""
    made = train_tokenizer(["what is it", "a fox"] * 3, 290, Progress(None), ["<s>"])
    made.bos_token = "<s>"
    made.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", made.bos_token_id)])
    return made


def counted(text: TokenisedText, tokenizer: Any, index: int = 0) -> str:
    """The tokens that count, those that follow each other as one text, separated by bars."""
    parts, tokens = [[]], text.document(index)
    for token, label in zip(tokens, text.labels_of(index), strict=True):
        assert label in (token, -100)
        if label != -100:
            parts[-1].append(int(token))
        elif parts[-1]:
            parts.append([])
    return "|".join(tokenizer.decode(part) for part in parts if part)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by generation tags"])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [({}, f"a fox{END}|an owl{END}"), ({"loss": "completion"}, f"an owl{END}"), ({"loss": "all"}, WHOLE)],
    ids=["assistant", "completion", "all"],
)
def test_the_turns_of_a_conversation_that_count(
    tokenise: Tokenise, tokenizer: Any, template: str, loss: dict[str, str], expected: str
) -> None:
    text = tokenise([{"messages": TURNS}], template, **loss)
    assert tokenizer.decode(text.document(0)) == WHOLE
    assert counted(text, tokenizer) == expected


def calls(is_text: bool = False) -> list[dict[str, Any]]:
    """Rows of two conversations, each with a call of a tool that the other hasn't."""
    rows = []
    for name, given in (("f", {"x": 1}), ("g", {"y": "s"})):
        tools: Any = [{"function": {"name": name, "parameters": given}}]
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": given}}]}
        messages = [{"role": "user", "content": "a"}, call]
        rows.append({"messages": messages, "tools": json.dumps(tools) if is_text else tools})
    return rows


def write(rows: list[dict[str, Any]], file: Path) -> Path:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("is_text", [False, True], ids=["lists", "JSON text"])
@pytest.mark.parametrize("form", ["conversations", "completions", "pairs"])
def test_calls_have_the_arguments_that_they_were_given(
    form: str, is_text: bool, tmp_path: Path, tokenizer: Any
) -> None:
    """A .parquet file has the arguments of all tools in every row, null where they are another's."""
    rows = calls(is_text)
    if form != "conversations":
        answers = ["completion"] if form == "completions" else ["chosen", "rejected"]
        for row in rows:
            question, call = row.pop("messages")
            each = {name: [call | {"content": name}] for name in answers}
            row |= {"prompt": [question]} | each
    source = SourceSection(dataset=str(write(rows, tmp_path / "rows.parquet")))
    tokenizer.chat_template = (
        "{{ tools }}{% for each in messages %}{% generation %}{{ each }}{% endgeneration %}{% endfor %}"
    )
    opened = OpenSource.of(source, pytest.fail, "pairs" if form == "pairs" else None)
    text = opened.tokenise(tokenizer, ChatTemplate(tokenizer), 500, Progress(None))
    documents = [[0], [1]] if form != "pairs" else [[0, 1], [2, 3]]
    for index, numbers in enumerate(documents):
        for written in (tokenizer.decode(text.document(number)) for number in numbers):
            assert "None" not in written
            assert "\\" not in written  # of JSON text
            assert [written.count(each) for each in ("'x'", "'y'")] == ([2, 0] if index == 0 else [0, 2])


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_streamed_calls_have_the_arguments_that_they_were_given(suffix: str, tmp_path: Path) -> None:
    stream = RowStream(SourceSection(dataset=str(write(calls(), tmp_path / f"rows{suffix}"))), 5)
    given = [{"content": "a", "role": "user"}]
    rows = [row | {"messages": [given[0], row["messages"][1]]} for row in stream.next_block()[1]]
    assert rows == calls()


def test_turns_that_the_template_writes_otherwise_at_the_end_are_refused(tokenise: Tokenise, tokenizer: Any) -> None:
    with pytest.raises(SlipstreamError, match=r"row 2: .* first 2 messages are written differently than by.*--da"):
        tokenise([{"messages": TURNS[:2]}, {"messages": TURNS}], LAST_ONLY)
    assert "!an owl" in tokenizer.decode(tokenise([{"messages": TURNS}], LAST_ONLY, loss="all").document(0))


def test_a_completion_counts_and_its_prompt_begins_as_a_generation_would(tokenise: Tokenise, tokenizer: Any) -> None:
    rows = [{"prompt": "what is", "completion": " it"}, {"prompt": "wha", "completion": "t"}]
    said: list[str] = []
    text = tokenise([*rows, rows[1]], say=said.append)
    (line,) = said
    assert "such as 'wha' and 't', would share a token: they are tokenised apart" in line
    assert counted(text, tokenizer) == " it" + END
    assert counted(text, tokenizer, 1) == "t" + END
    assert len(tokenizer("what")["input_ids"]) < len(text.document(1)) - 1  # which would be half prompt
    for index, row in enumerate(rows):
        prompt = tokenizer(row["prompt"])["input_ids"]
        assert text.document(index)[: len(prompt)].tolist() == prompt
    joined = tokenise(rows, loss="all")
    assert counted(joined, tokenizer) == "what is it" + END
    assert counted(joined, tokenizer, 1) == "what" + END
    assert joined.document(1).tolist() == [*tokenizer("what")["input_ids"], tokenizer.eos_token_id]


def test_answers_to_a_prompt_whose_tokens_they_share_are_named(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "wha", "chosen": "t", "rejected": " fox"}, {"prompt": "wha", "chosen": "ts", "rejected": "t"}]
    file = write(rows, tmp_path / "rows.jsonl")
    said: list[str] = []
    progress = Progress(None)
    progress.warn = said.append  # type: ignore[method-assign]
    OpenSource.of(SourceSection(dataset=str(file)), pytest.fail, "pairs").tokenise(tokenizer, None, 50, progress)
    assert len(said) == 1
    assert "such as 'wha' and 't', would share a token" in said[0]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<s>what is", "completion": " it"},
        {"text": "<s>what is it"},
        {"messages": [{"role": "user", "content": "<s>what is it"}, TURNS[1]]},
    ],
    ids=["prompt", "text", "messages"],
)
def test_two_begin_tokens_are_warned_of(row: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = with_begin_token()
    tokenizer.chat_template = "{{ bos_token }}{% for each in messages %}{{ each.content }}{{ eos_token }}{% endfor %}"

    def warnings(row: dict[str, Any]) -> list[str]:
        said: list[str] = []
        progress = Progress(None)
        progress.warn = said.append  # type: ignore[method-assign]
        source = OpenSource.of(
            SourceSection(dataset=str(write([row, row], tmp_path / "rows.jsonl")), loss="all"), print
        )
        text = source.tokenise(tokenizer, ChatTemplate(tokenizer) if source.has_messages else None, 50, progress)
        assert text.document(0)[0] == tokenizer.bos_token_id
        return said

    assert warnings(json.loads(json.dumps(row).replace("<s>", ""))) == []
    (said,) = warnings(row)
    assert "2 of the first 2 documents begin with two <s>: the tokenizer begins each with one, which the text" in said


@pytest.mark.parametrize(("prompt", "number"), [("<s>what is it", 1), ("what is it", 0)])
def test_a_prompt_with_a_begin_token_of_its_own_is_warned_of(prompt: str, number: int) -> None:
    """In a run's sample and in `slipstream generate`."""
    tokenizer, said = with_begin_token(), list[str]()
    progress = Progress(None)
    progress.warn = said.append  # type: ignore[method-assign]
    check_sample(SampleSection(prompt=prompt), tokenizer, LlamaConfig(), progress)
    writer = TextWriter(LlamaForCausalLM(LlamaConfig(**SMALL)), tokenizer, None)
    said += [writer.warning(prompt)] if writer.warning(prompt) else []
    assert len(said) == 2 * number
    assert all("'<s>what is it' begins with two <s>" in text for text in said)


def test_a_completion_of_messages(tokenise: Tokenise, tokenizer: Any) -> None:
    rows = [{"prompt": TURNS[:3], "completion": TURNS[3:]}]
    assert counted(tokenise(rows), tokenizer) == "an owl" + END
    assert counted(tokenise(rows, loss="assistant"), tokenizer) == f"a fox{END}|an owl{END}"


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": " fox"}]
SHAREGPT = [
    {"from": "human", "value": "what is it"},
    {"from": "gpt", "value": "a fox"},
    {"from": "human", "value": "and this"},
    {"from": "gpt", "value": "an owl"},
]


@pytest.mark.parametrize(
    ("row", "written"),
    [
        ({"conversations": SHAREGPT}, "<user>what is it<assistant>a fox|<user>and this<assistant>an owl|"),
        ({"conversations": SHAREGPT[:2], "system": "and"}, "<system>and<user>what is it<assistant>a fox|"),
        ({"conversations": SHAREGPT[:2], "system": ""}, "<user>what is it<assistant>a fox|"),
        ({"conversations": TURNS[:2]}, "<user>what is it<assistant>a fox|"),
        ({"messages": SHAREGPT[:2], "conversations": None}, "<user>what is it<assistant>a fox|"),
        (
            {"conversations": [{"from": "system", "value": "and"}, {"from": "observation", "value": "it"}, TURNS[1]]},
            "<system>and<tool>it<assistant>a fox|",
        ),
        ({"instruction": "what", "input": "is it", "output": "a fox"}, "<user>what\n\nis it<assistant>a fox|"),
        ({"instruction": "what", "input": "", "output": "a fox"}, "<user>what<assistant>a fox|"),
        ({"instruction": "what", "context": "it", "response": "an owl"}, "<user>what\n\nit<assistant>an owl|"),
        ({"question": "what", "answer": "an owl", "id": 3}, "<user>what<assistant>an owl|"),
        (
            {"instruction": "and this", "output": "an owl", "system": "is", "history": [["what", "a fox"]]},
            "<system>is<user>what<assistant>a fox|<user>and this<assistant>an owl|",
        ),
    ],
)
def test_rows_of_other_tools_become_conversations(
    tokenise: Tokenise, tokenizer: Any, row: dict[str, Any], written: str
) -> None:
    text = tokenise([row])
    written = written.replace("|", END)
    assert tokenizer.decode(text.document(0)) == written
    answers = [part.partition("<assistant>")[2] for part in written.split("<user>")]
    assert counted(text, tokenizer) == "|".join(answer for answer in answers if answer)


def test_the_first_samples_alone_are_read(tokenise: Tokenise, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"question": "what", "answer": word} for word in ("a fox", "an owl", "it")]
    assert tokenise(rows, max_samples=2).num_documents == 2
    assert tokenise(rows, max_samples=9).num_documents == 3
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    texts = OpenSource.of(SourceSection(files=[tmp_path / "a.txt", tmp_path / "b.txt"], max_samples=1), pytest.fail)
    assert [*texts.texts()] == ["a.txt"]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_the_first_samples_of_a_stream_come_in_every_epoch(suffix: str, tmp_path: Path) -> None:
    file = write([{"text": str(number)} for number in range(9)], tmp_path / f"rows{suffix}")
    stream = RowStream(SourceSection(dataset=str(file), max_samples=5), 3)
    first = [row["text"] for row in stream.next_block()[1]]
    state = stream.state()
    rest = [[row["text"] for row in stream.next_block()[1]] for _ in range(3)]
    assert [first, *rest] == [["0", "1", "2"], ["3", "4"], ["0", "1", "2"], ["3", "4"]]
    again = RowStream(SourceSection(dataset=str(file), max_samples=5), 3)
    again.go_to(state)
    assert [[row["text"] for row in again.next_block()[1]] for _ in range(3)] == rest
    assert stream.facts == again.facts
    others = [{"text": str(8 - number)} for number in range(9)]  # as many bytes
    assert stream.facts != RowStream(SourceSection(dataset=str(write(others, file)), max_samples=5), 3).facts
    assert stream.facts != RowStream(SourceSection(dataset=str(file)), 3).facts


def test_tokens_with_labels(tokenise: Tokenise) -> None:
    text = tokenise([{"input_ids": [1, 2, 3], "labels": [-100, -100, 7]}, {"input_ids": [4, 5], "labels": [4, 5]}])
    assert text.tokens.tolist() == [1, 2, 3, 4, 5]
    assert text.labels is not None
    assert text.labels.tolist() == [-100, -100, 7, 4, 5]
    assert text.largest() == 7
    assert tokenise([{"input_ids": [1, 2]}]).labels_of(0).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("columns", "tokens", "labels"),
    [
        ({"attention_mask": [1, 1, 1, 0, 0]}, [1, 2, 3], [1, 2, 3]),
        ({"attention_mask": [0, 1, 1, 1, 1]}, [2, 3, 4, 5], [2, 3, 4, 5]),
        ({"attention_mask": [1, 1, 1, 1, 0], "labels": [-100, 2, 3, -100, -100]}, [1, 2, 3, 4], [-100, 2, 3, -100]),
        ({"attention_mask": None, "loss_mask": None}, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        ({"loss_mask": [0, 1, 1, 0, 1]}, [1, 2, 3, 4, 5], [-100, 2, 3, -100, 5]),
        ({"completion_mask": [False, True, True, True, True]}, [1, 2, 3, 4, 5], [-100, 2, 3, 4, 5]),
        (
            {"assistant_masks": [0, 0, 1, 1, 1], "completion_mask": [0, 1, 1, 1, 0]},
            [1, 2, 3, 4, 5],
            [-100, -100, 3, 4, -100],
        ),
    ],
)
def test_masks_beside_tokens(tokenise: Tokenise, columns: dict[str, Any], tokens: list[int], labels: list[int]) -> None:
    text = tokenise([{"input_ids": [1, 2, 3, 4, 5]} | columns])
    assert text.document(0).tolist() == tokens
    assert text.labels_of(0).tolist() == labels


def test_a_source_says_which_masks_it_has(tmp_path: Path) -> None:
    file = write([{"input_ids": [1, 2], "loss_mask": [0, 1]}], tmp_path / "rows.jsonl")
    source = OpenSource.of(SourceSection(dataset=str(file)), pytest.fail)
    assert source.describe() == "tokens: 1 sample, of which what loss_mask says counts"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [TURNS[0], {"role": "assistant", "content": PARTS}]},
        {"conversations": [SHAREGPT[0], {"from": "gpt", "value": PARTS}]},
        {"prompt": TURNS[:1], "completion": [{"role": "assistant", "content": PARTS}]},
    ],
    ids=["messages", "sharegpt", "completion"],
)
def test_texts_in_parts_are_joined(tokenise: Tokenise, tokenizer: Any, row: dict[str, Any], tmp_path: Path) -> None:
    text = tokenise([row])
    assert tokenizer.decode(text.document(0)) == f"<user>what is it<assistant>a fox{END}"
    assert counted(text, tokenizer) == "a fox" + END
    source = OpenSource.of(SourceSection(dataset=str(write([row], tmp_path / "again.jsonl"))), pytest.fail)
    assert [*source.texts()] == ["what is it", "a", " fox"]


def test_a_parquet_file_of_conversations(tmp_path: Path, tokenizer: Any) -> None:
    """Whose messages have empty columns where others have tools."""
    file = tmp_path / "chat.parquet"
    turns = [TURNS[:2], [*TURNS[:1], {**TURNS[1], "tool_calls": ["x"]}]]
    pyarrow.parquet.write_table(pyarrow.table({"messages": turns}), file)
    source = OpenSource.of(SourceSection(dataset=str(file)), pytest.fail)
    tokenizer.chat_template = "{% for message in messages %}{{ message.keys()|list|length }}{% endfor %}"
    text = source.tokenise(tokenizer, ChatTemplate(tokenizer), 50, Progress(None))
    assert [tokenizer.decode(text.document(number)) for number in (0, 1)] == ["22", "23"]


def test_what_is_left_out_or_cut_is_counted(tokenise: Tokenise, tokenizer: Any) -> None:
    said: list[str] = []
    silent = {"role": "assistant", "content": None}
    late = [{"role": "user", "content": "what is it" * 20}, TURNS[1]]  # so that its answer is cut off
    rows = [TURNS, None, [], [TURNS[0], silent], [TURNS[0]], late, TURNS[:2]]
    short = len(tokenise([{"messages": TURNS[:2]}]).tokens)
    text = tokenise([{"messages": each} for each in rows], seq_len=short, say=said.append)
    assert text.lengths.tolist() == [short, short]
    assert counted(text, tokenizer) == counted(text, tokenizer, 1) == "a fox" + END
    (line,) = said
    assert line.endswith(
        "left out 5 of 7 samples: 2 without content (null), 1 empty, 1 in which no turn is the assistant's (the roles "
        f"are user), 1 in which no token counts (of the first {short}); "
        f"1 of 7 samples have more than training.seq_len={short} tokens: what comes after them is left out"
    )


@pytest.mark.parametrize(
    ("row", "more", "words"),
    [
        ({"text": "a", "messages": TURNS}, {}, "columns of several forms (text, messages); choose one with data.form"),
        ({"text": "a"}, {"form": "messages"}, "has no column 'messages'"),
        ({"text": "a"}, {"loss": "assistant"}, "data.loss=assistant for data.dataset="),
        ({"input_ids": [1, 2], "labels": [1, 2]}, {"loss": "completion"}, "the column labels says which tokens count"),
        (
            {"messages": [{"speaker": "human", "value": "a"}]},
            {},
            "row 1: each message in messages needs a role and a cont",
        ),
        ({"messages": [{"from": "me", "value": "a"}]}, {}, "row 1: a message in messages is from 'me', which is none"),
        ({"question": "a", "answer": ["b"]}, {}, "row 1: question and answer must be texts"),
        ({"question": "a", "answer": "b", "history": "c"}, {}, "row 1: history must be a list of pairs"),
        ({"instruction": "a", "output": "b", "text": "c"}, {}, "choose one with data.form: question-answer or text"),
        ({"messages": ["a"]}, {}, "row 1: messages must be a list of messages like {role: user"),
        ({"prompt": "a", "completion": TURNS}, {}, "must both be texts or both lists of messages"),
        ({"prompt": "a", "completion": "b"}, {"loss": "assistant"}, "data.loss=assistant needs messages"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, "row 1: labels has 1 tokens, but input_ids 2; give the same number"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, {}, "row 1: attention_mask is 0 at token 2, between"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, {}, "left out 1 of 1 samples: 1 empty"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, {}, "row 1: attention_mask must be lists of 0 and 1, and"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, {}, "row 1: loss_mask has 1 values, but input_ids 2"),
        (
            {"input_ids": [1, 2], "position_ids": [0, 1]},
            {},
            "row 1: the rows have the column position_ids, which is",
        ),
        ({"input_ids": [1, 2], "seq_lengths": [1, 1]}, {}, "row 1: the rows have the column seq_lengths, which isn't"),
        (
            {"messages": [TURNS[0], {"role": "assistant", "content": 5}]},
            {},
            "row 1: turn 2 of messages has a content of type int; give a text",
        ),
        (
            {"messages": [{"role": "user", "content": {"text": "a"}}, TURNS[1]]},
            {},
            "row 1: turn 1 of messages has a content of type dict",
        ),
        (
            {"messages": [{"role": "user", "content": [*PARTS, {"type": "image", "text": None}]}, TURNS[1]]},
            {},
            "row 1: turn 1 of messages has a part that isn't text: image; give a text",
        ),
        (
            {"prompt": TURNS[:1], "completion": [{"role": "assistant", "content": ["a"]}]},
            {},
            "row 1: turn 1 of completion has a part that isn't text: str",
        ),
        ({"question": "a", "answer": "b", "history": [["c", None]]}, {}, "row 1: history must be pairs of texts"),
        ({"input_ids": [1, -100]}, {}, "row 1: input_ids must be lists of token ids"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, {}, "row 1: labels must be lists of token ids, or -100"),
        (
            {"messages": [TURNS[0], {"role": "narrator", "content": "a fox"}]},
            {},
            NOTHING + "turn is the assistant's (the roles are user, narrator)",
        ),
        ({"messages": TURNS[:2]}, {"seq_len": 3}, NOTHING + "token counts"),
        (
            {"messages": TURNS},
            {"template": "{{ raise_exception('no systems') }}"},
            "row 1: the chat template can't write this conversation: no systems",
        ),
        # A generation, that begins after the header, would never have a token of header and turn.
        (
            {"messages": [TURNS[0], {"role": "assistant", "content": "fox"}]},
            {"template": MERGING},
            "its first 1 messages and a header have other tokens than",
        ),
    ],
)
def test_rows_of_which_nothing_can_be_made_are_named(
    tokenise: Tokenise, row: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(SlipstreamError) as problem:
        tokenise([row], **more)
    assert words in str(problem.value)


def test_a_tokenizer_without_a_template(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = None
    with pytest.raises(SlipstreamError, match=r"has no chat template.*--data.chat_template=chat.jinja"):
        ChatTemplate(tokenizer)
    with pytest.raises(SlipstreamError, match=r"none.jinja is neither a file here nor one of"):
        ChatTemplate(tokenizer, tmp_path / "none.jinja")
    (tmp_path / "chat.jinja").write_text(PLAIN, encoding="utf-8-sig")  # whose mark is no token
    ChatTemplate(tokenizer, tmp_path / "chat.jinja")
    assert tokenizer.chat_template == PLAIN  # which an export has


@pytest.mark.parametrize("has_colours", [True, False])
def test_an_example_shows_what_counts(
    tokenise: Tokenise, tokenizer: Any, has_colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(
        file=StringIO(), force_terminal=has_colours, soft_wrap=True, color_system="standard" if has_colours else None
    )
    show_example(tokenise([{"messages": TURNS[:2]}]), tokenizer, Progress(console))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tokens count" in shown
    assert (f"<assistant>\x1b[1;32ma fox{END}" if has_colours else f"<assistant>[[a fox{END}]]") in shown
