"""Texts of files, folders and data sets are read in order, and tokenised as they are meant to be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import DataSection, SourceSection
from slipstream.train.data import load_tokenizer, read_documents
from slipstream.train.data.open_source import OpenSource
from slipstream.train.data.streams import RowStream
from slipstream.train.data.tokenised_text import END_OF_DOCUMENT, tokenise, train_tokenizer

SUFFIXES = [".txt", ".jsonl", ".json", ".csv", ".parquet"]
TEXTS = ["first text", "second text, longer", "third"]


def test_files_and_folders_in_order(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "b.txt").write_text("b")
    (tmp_path / "folder" / "deep" / "c.md").write_text("c")
    (tmp_path / "folder" / "a.txt").write_text("a")
    (tmp_path / "folder" / "blank.txt").write_text("  \n")
    (tmp_path / "folder" / "code.py").write_text("not asked for")
    (tmp_path / "single.rst").write_text("single")
    config = DataSection(files=[tmp_path / "single.rst", tmp_path / "folder"])
    said: list[str] = []
    assert [*read_documents(config, said.append)] == ["single", "a", "b", "c"]
    assert said[0].endswith("left out 1 of 5 documents: 0 without text (null), 1 empty or of white space")


def write(texts: list[str], path: Path) -> Path:
    if path.suffix == ".txt":
        path.write_text("\n".join(texts))
    elif path.suffix in (".jsonl", ".json"):
        path.write_text("\n".join(json.dumps({"text": text, "other": 1}) for text in texts))
    elif path.suffix == ".csv":
        path.write_text("other,text\n" + "".join(f'1,"{text}"\n' for text in texts))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_dataset_file(tmp_path: Path, suffix: str) -> None:
    """Which may also be named among the files: a table is read as rows there, too."""
    path = write(TEXTS, tmp_path / f"data{suffix}")
    assert [*read_documents(DataSection(dataset=str(path)), pytest.fail)] == TEXTS
    if suffix != ".txt":
        assert [*read_documents(DataSection(files=[path]), pytest.fail)] == TEXTS


@pytest.mark.parametrize("where", ["dataset", "validation", "folder"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_was_replaced_by_one_of_its_size_and_time_is_read_anew(
    tmp_path: Path, suffix: str, where: str
) -> None:
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows" / f"data{suffix}"

    def source() -> SourceSection:
        if where == "validation":
            found = DataSection(dataset=str(path), validation=str(path)).validation_source
            assert found is not None
            return found
        return SourceSection(dataset=str(path.parent if where == "folder" else path))

    def read() -> list[str]:
        return [*OpenSource.of(source(), pytest.fail).texts()]

    write(TEXTS, path)
    os.utime(path, (1e9, 1e9))
    size = path.stat().st_size
    assert read() == TEXTS
    others = [text[::-1] for text in TEXTS]
    write(others, path)
    os.utime(path, (1e9, 1e9))
    assert path.stat().st_size == size
    assert read() == others


def test_tables_among_files_and_in_folders(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": text}))
    files = [tmp_path / f"{number}.jsonl" for number in (2, 0)]
    assert [*read_documents(DataSection(files=files), pytest.fail)] == [TEXTS[2], TEXTS[0]]
    assert [*read_documents(DataSection(files=[tmp_path], suffixes=[".jsonl"]), pytest.fail)] == TEXTS
    (tmp_path / "broken.jsonl").write_text('{"text": 1}\n{')
    with pytest.raises(SlipstreamError, match=r"data.files=.*broken.jsonl, line 2 isn't JSON"):
        read_documents(DataSection(files=[*files, tmp_path / "broken.jsonl"]), pytest.fail)


@pytest.mark.parametrize("where", ["file", "folder", "dataset", "stream"])
def test_a_byte_order_mark_is_no_token(where: str, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("first\n", encoding="utf-8-sig")
    if where in ("file", "folder"):
        source = DataSection(files=[path if where == "file" else tmp_path])
        assert [*read_documents(source, pytest.fail)] == ["first\n"]
    elif where == "dataset":
        assert [*read_documents(DataSection(dataset=str(path)), pytest.fail)] == ["first"]
    else:
        assert [row["text"] for row in RowStream(DataSection(dataset=str(path)), 9).next_block()[1]] == ["first"]


def test_cells_of_a_csv_file_are_texts(tmp_path: Path) -> None:
    """Also numbers, and what pandas takes for missing."""
    path = tmp_path / "data.csv"
    path.write_text("\ufefftext,note\n007,x\nnull,\nNA,3\n", encoding="utf-8")
    assert [*read_documents(DataSection(files=[path]), pytest.fail)] == ["007", "null", "NA"]


@pytest.mark.parametrize("second", ["b.txt", "b.parquet", "folder"])
def test_files_of_several_kinds_are_refused(tmp_path: Path, second: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"and a source takes one kind.* --data.sources=\[{files: \[a.txt\]}"):
        DataSection(files=[tmp_path / "a.jsonl", tmp_path / second])


def test_rows_without_text_are_counted(tmp_path: Path) -> None:
    path, said = tmp_path / "data.jsonl", []
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*TEXTS, None, "", None]))
    assert [*read_documents(DataSection(dataset=str(path)), said.append)] == TEXTS
    left_out = "left out 3 of 6 documents: 2 without text (null), 1 empty or of white space"
    assert said == [f"data.dataset={path}: {left_out}"]


def test_the_standard_library_is_here() -> None:
    documents = read_documents(DataSection(corpus="python-stdlib"), [].append)
    assert len(documents) > 300
    assert any("class JSONDecodeError" in document for document in documents)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no file or folder"),
        (b"", "holds no text"),
        (b" \n ", "holds no text"),
        (b"\x89PNG", r"isn't UTF-8 text \(byte 0\); convert it"),
    ],
)
def test_empty_or_unreadable_files(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SlipstreamError, match=words):
        read_documents(DataSection(files=[path]), pytest.fail)


def test_a_folder_without_text_names_the_endings(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"no file ending in \.txt, \.md.*--data.suffixes"):
        read_documents(DataSection(files=[tmp_path]), pytest.fail)


def test_a_wrong_column_lists_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"body": "x", "title": "y"}))
    with pytest.raises(SlipstreamError, match=r"no column 'text'; choose data.text_column, .* from: body, title"):
        OpenSource.of(DataSection(dataset=str(path)), pytest.fail)


def test_a_trained_tokenizer_closes_documents_and_survives_saving(tmp_path: Path) -> None:
    documents = ["for x in range(10):\n    print(x)\n" * 20, "while True:\n    naïve = '☃'\n" * 20]
    tokenizer = train_tokenizer(documents, 300, Progress(None))
    assert len(tokenizer) <= 300
    text = tokenise(tokenizer, documents, Progress(None))
    assert text.num_documents == 2
    for index, document in enumerate(documents):
        tokens = text.document(index)
        assert tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(tokens) == document + END_OF_DOCUMENT
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode(documents[1]) == tokenizer.encode(documents[1])


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(SlipstreamError, match="at least 257 tokens; given: 256"):
        train_tokenizer(["x"], 256, Progress(None))


CODE = """
from transformers import PreTrainedTokenizerFast
class Spiral(PreTrainedTokenizerFast):
    pass
"""


def test_code_of_a_tokenizer_runs_only_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "spiral"
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])), eos_token="a")
    made.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Spiral", "auto_map": {"AutoTokenizer": [None, "tokenization_spiral.Spiral"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenization_spiral.py").write_text(CODE)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # who would say yes to anything
    with pytest.raises(SlipstreamError, match=r"Python code of its own.*set model.trust_remote_code: true"):
        load_tokenizer(str(folder))
    trusted = load_tokenizer(str(folder), trusts_code=True)
    assert type(trusted).__name__ == "Spiral"
    trusted.save_pretrained(tmp_path / "export")
    assert (tmp_path / "export" / "tokenization_spiral.py").is_file()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "gpt2", "gemma", "gpt_neox", "cohere", "llama"])
def test_a_configuration_alone_has_no_tokenizer(tmp_path: Path, kind: str) -> None:
    """Of most of these transformers makes one of its special tokens alone, and saves it like any other."""
    bare, saved = tmp_path / "bare", tmp_path / "saved"
    CONFIG_MAPPING[kind]().save_pretrained(bare)
    with pytest.raises(
        SlipstreamError, match=r"no tokenizer in .*: the folder has no tokenizer\.json.*data\.tokenizer"
    ):
        load_tokenizer(str(bare))
    if kind != "llama":
        AutoTokenizer.from_pretrained(bare).save_pretrained(saved)
        with pytest.raises(SlipstreamError, match=r"no tokenizer in .*: it has no vocabulary but its special tokens"):
            load_tokenizer(str(saved))


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SlipstreamError, match=r"the tokenizer in .* can't be read"):
        load_tokenizer(str(tmp_path))


def of_words(words: list[str], unknown: str | None, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows these words."""
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=unknown or "?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


WORDS = ["?", "<end>", "owl", "fox", "sees", "the"]
TEXT = "the owl sees the fox"


@pytest.mark.parametrize("special", [{"unk_token": "?", "eos_token": "<end>"}, {"unk_token": "?"}, {}], ids=str)
@pytest.mark.parametrize("row", [{"text": "TEXT"}, {"prompt": "TEXT", "completion": "TEXT"}], ids=["text", "samples"])
@pytest.mark.parametrize(("text", "is_known"), [(TEXT, True), ("an owl", True), ("an emu hides", False)])
def test_text_that_a_tokenizer_does_not_know(
    tmp_path: Path, special: dict[str, str], row: dict[str, str], text: str, is_known: bool
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict.fromkeys(row, f"{text} {TEXT[:3]}")) + "\n")
    source = SourceSection(dataset=str(tmp_path / "rows.jsonl"))
    opened, tokenizer = OpenSource.of(source, lambda _: None), of_words(WORDS, "?", **special)
    if is_known:
        assert opened.tokenise(tokenizer, None, 64, Progress(None)).num_documents == 1
        return
    with pytest.raises(SlipstreamError, match=r"doesn't know the text of .*rows\.jsonl: \d of \d tokens are '\?'"):
        opened.tokenise(tokenizer, None, 64, Progress(None))
