"""The sections `data` and `preference` of a configuration: the training data, and how it becomes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from slipstream.options import Record
from slipstream.train.config.sections import PipelineSection

Form = Literal["text", "messages", "prompt-completion", "question-answer", "tokens"]
Loss = Literal["all", "assistant", "completion"]
_SOURCES = ("corpus", "files", "dataset")
TABLES = (".json", ".jsonl", ".csv", ".parquet")
"""Endings of files that have rows, in `dataset` and in `files`."""
_ENDINGS = (".txt", *TABLES)


class SourceSection(Record):
    """A source of samples: one of `corpus`, `files` and `dataset`."""

    corpus: Literal["python-stdlib"] | None = None
    """Text that every machine has: the source files of Python's standard library."""
    files: list[Path] | None = None
    """Text files and folders, each file of which is a document; or .jsonl, .csv or .parquet files, whose rows are the
    samples, as with `dataset`."""
    suffixes: list[str] = Field(default=[".txt", ".md"])
    """Which files of a folder are read."""
    dataset: str | None = None
    """A .txt (a line is a document), .jsonl, .csv or .parquet file, or the hub name of a data set."""
    dataset_config: str | None = None
    """Configuration of a data set on the hub, where it has several."""
    split: str = "train"
    """Which split of the data set is read."""
    form: Form | None = None
    """What a row of the data set is. text: a document, in `text_column`. messages: a conversation, in
    `messages_column`. prompt-completion: the columns `prompt` and `completion`, both texts or both lists of messages.
    question-answer: a conversation of two turns, in columns such as `question` and `answer`, or Alpaca's
    `instruction`, `input` and `output`. tokens: the columns `input_ids` and, where there are any, `labels`, of which
    -100 doesn't count, `loss_mask`, `completion_mask` and `assistant_masks`, of which 0 doesn't, and `attention_mask`,
    which is 0 for padding. Default: what the columns say."""
    text_column: str = "text"
    """The column that holds the documents."""
    messages_column: str = "messages"
    """The column that holds the conversations: lists of messages, each with a role and a content, or as ShareGPT has
    them, with `from` and `value`. Without such a column, one called `conversations` is read."""
    loss: Loss | None = None
    """The tokens that count. all; assistant: those of the assistant's turns; completion: those of `completion`, or of
    a conversation's last turn. Default: assistant for messages and questions, completion for prompt-completion, else
    all."""
    max_samples: PositiveInt | None = None
    """Read only the first so many rows or documents. Default: all."""

    @field_validator("suffixes")
    @classmethod
    def _have_dots(cls, suffixes: list[str]) -> list[str]:
        dotted = ", ".join(f".{suffix.removeprefix('.')}" for suffix in suffixes)
        if without := [suffix for suffix in suffixes if not suffix.startswith(".")]:
            raise ValueError(f"{without[0]!r} lacks its dot; give [{dotted}]")
        return suffixes

    @model_validator(mode="after")
    def _one_kind_of_files(self) -> Self:
        """Takes texts or tables, and tables that are read alike."""
        endings = self._file_endings()
        if len({ending.replace(".jsonl", ".json") for ending in endings}) > 1:
            kinds = " and ".join(ending or "of texts" for ending in endings)
            raise ValueError(
                f"data.files names files {kinds}, and a source takes one kind: tables are read as rows, a text "
                "as a document. Give each kind as a source: --data.sources=[{files: [a.txt]}, {files: [b.jsonl]}]"
            )
        return self

    def _file_endings(self) -> list[str]:
        """Returns the endings of tables among `files`, and "" where there is anything else."""
        endings = (self.suffixes if path.is_dir() else [path.suffix] for path in self.files or ())
        return sorted({ending if ending in TABLES else "" for group in endings for ending in group})

    @property
    def has_rows(self) -> bool:
        """Whether it is read as the rows of a data set, and not as texts."""
        return self.dataset is not None or any(self._file_endings())

    @property
    def option(self) -> str:
        """The setting that names it."""
        return f"data.{self._given_sources()[0]}"

    @property
    def name(self) -> str:
        """The source as it is typed."""
        if self.files is not None:
            return f"{self.option}=" + ", ".join(map(str, self.files))
        return f"{self.option}={self.corpus if self.dataset is None else self.dataset}"

    def _given_sources(self) -> list[str]:
        return [name for name in _SOURCES if getattr(self, name) is not None]


class WeightedSource(SourceSection):
    """One of several sources."""

    weight: PositiveFloat | None = None
    """The share of the sequences that come from this source, as a part of the sum of all weights."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = self._given_sources()
        if len(sources) != 1:
            what = " and ".join(sources) or "none"
            raise ValueError(f"each of data.sources is one of corpus, files and dataset; given: {what}")
        return self


class DataSection(SourceSection):
    """The samples, and how they become tokens: one of `corpus`, `files`, `dataset` and `sources`."""

    sources: list[WeightedSource] | None = Field(default=None, min_length=1)
    """Several sources, each with the settings above and a `weight`. Without weights each sample comes once an epoch;
    with `streaming` each needs one."""
    packing: Literal["fixed", "none"] = "fixed"
    """fixed: documents follow each other in sequences of `training.seq_len` tokens; conversations and the like aren't
    cut but put together into such sequences, whose rest is padding. none: each document is a sequence, and one of more
    than `training.seq_len` tokens is cut there; a step has `training.batch_size` or `training.batch_tokens` of them.
    Documents of a step that share a microbatch don't see each other."""
    tokenizer: str | None = None
    """A folder or hub name. Default: the one of `model.path`; without one, a BPE is trained on the text."""
    vocab_size: PositiveInt | None = None
    """Tokens of the tokenizer that is trained here. Default: the model's vocabulary."""
    chat_template: Literal["chatml", "gemma", "llama3", "zephyr"] | Path | None = None
    """The template by which messages become text: a file in Jinja, or a name, whose special tokens the tokenizer then
    gets and whose end of a turn becomes the end of text. Default: the tokenizer's own."""
    special_tokens: list[str] = Field(default=[])
    """Tokens that the tokenizer gets in addition, such as `['<|im_start|>', '<|im_end|>']`. Their rows in the embedding
    and the head, new ones or padding that was there, are the mean of the rows of the model's own tokens."""
    end_of_text: str | None = None
    """The token that ends a text, at which the exported model stops: one of the tokenizer's or of `special_tokens`.
    Default: the tokenizer's own."""
    streaming: bool = False
    """Read rows while training, and keep neither their text nor their tokens; for files or data sets of the hub that
    are too large for that. Needs `training.steps` and a tokenizer."""
    shuffle_rows: PositiveInt = 10_000
    """With `streaming`: how many rows of each source are read, shuffled and trained on at a time."""
    validation: str | None = None
    """What is held out: a file of the same form, or the name of a split of `dataset`."""
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of the documents that is held out where `validation` isn't given."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [*self._given_sources(), *(["sources"] if self.sources is not None else [])]
        if len(sources) != 1:
            what = " and ".join(sources) or "none"
            raise ValueError(f"give one of data.corpus, data.files, data.dataset and data.sources; given: {what}")
        if self.tokenizer is not None and self.vocab_size is not None:
            raise ValueError("data.vocab_size is for a tokenizer trained here; remove it or data.tokenizer")
        if self.sources is not None:
            self._check_sources(self.sources)
        for source in self.all_sources if self.streaming else ():
            if not source.has_rows:
                raise ValueError(
                    f"data.streaming=true reads rows, but {source.name} has texts; use data.dataset, or leave "
                    "data.streaming out"
                )
        if self.validation is not None and self.dataset is None and not _is_file(self.validation):
            raise ValueError(
                f"data.validation={self.validation} isn't a file, and a split needs data.dataset; give a file"
            )
        return self

    def _check_sources(self, sources: list[WeightedSource]) -> None:
        names = (name for name in SourceSection.model_fields if name not in _SOURCES)
        if outside := [name for name in names if getattr(self, name) != type(self).model_fields[name].default]:
            raise ValueError(f"data.{outside[0]} with data.sources: give it to each of the sources that it is for")
        with_weight = [source.weight is not None for source in sources]
        if self.streaming and len(sources) > 1 and not any(with_weight):
            raise ValueError(
                "data.streaming=true with several data.sources: how many samples a stream has isn't known before it "
                "ends, so that only weights say how often each comes. Give each source one, such as weight: 1"
            )
        if any(with_weight) and not all(with_weight):
            place = with_weight.index(False) + 1
            raise ValueError(f"data.sources: number {place} has no weight, but others have; give all of them one")

    @property
    def all_sources(self) -> list[SourceSection]:
        """The sources that are trained on."""
        return [self] if self.sources is None else [*self.sources]

    @property
    def weights(self) -> list[float] | None:
        """The weight of each source; None where each sample comes once."""
        weights = [source.weight for source in self.sources or () if source.weight is not None]
        return weights or None

    @property
    def validation_source(self) -> SourceSection | None:
        """The source that `validation` names; None where it names none."""
        if self.validation is None:
            return None
        like = self.all_sources[0]
        shared = {"form": like.form, "text_column": like.text_column, "messages_column": like.messages_column}
        if not _is_file(self.validation):
            others = {"dataset": like.dataset, "dataset_config": like.dataset_config, "split": self.validation}
            return SourceSection(**shared, loss=like.loss, **others)
        if like.has_rows:
            return SourceSection(**shared, loss=like.loss, dataset=self.validation)
        return SourceSection(files=[Path(self.validation)])


def _is_file(name: str) -> bool:
    return Path(name).suffix in _ENDINGS or Path(name).exists()


_OF_OTHER_ROWS = ("form", "loss", "text_column", "messages_column", "suffixes")


class PreferenceSection(Record):
    """Training on pairs of a chosen and a rejected answer, or on answers of which each is wanted or not."""

    loss: Literal["dpo", "simpo", "orpo", "kto"] = "dpo"
    """dpo: the logistic loss of the difference between both answers' rewards (Rafailov et al. 2023, equation 7). A
    reward is beta times the log of how much more probable an answer has become since the start. simpo: the same without
    a reference model, for beta times the mean log-probability of an answer's tokens, less gamma (Meng et al. 2024,
    equation 6). orpo: the cross-entropy of the prompt with the chosen answer, and beta times the logistic loss of the
    log of both answers' odds ratio (Hong et al. 2024, equations 6 and 7). kto: how far each answer's reward is on the
    right side of a reference point, the mean reward of prompts with other prompts' answers (Ethayarajh et al. 2024,
    equation 8)."""
    beta: PositiveFloat = 0.1
    """What rewards are multiplied by. dpo, kto: a larger one keeps the model closer to what it was; simpo: 2 to 2.5 are
    usual; orpo: the weight of the odds ratio."""
    gamma: float = Field(default=0.5, ge=0)
    """simpo: by how much the chosen answer's reward should be larger."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """How probable it is that a pair is the wrong way round (conservative DPO, Mitchell 2023), for dpo and simpo."""
    desirable_weight: PositiveFloat = 1.0
    """kto: the weight of answers that are wanted."""
    undesirable_weight: PositiveFloat = 1.0
    """kto: the weight of the others."""
    dropout: bool = False
    """Whether the dropout of the model and of its adapter is on in training. Off, the model that is trained begins as
    the reference, from which dropout would tell it apart."""

    @property
    def has_reference(self) -> bool:
        """Whether rewards are relative to the model before the training."""
        return self.loss in ("dpo", "kto")

    @property
    def is_rated(self) -> bool:
        """Whether each answer has a loss of its own."""
        return self.loss == "kto"

    @property
    def answers(self) -> str:
        """The form of its rows."""
        return "rated" if self.is_rated else "pairs"

    @model_validator(mode="after")
    def _settings_of_the_loss(self) -> Self:
        allowed = {"gamma": ("simpo",), "label_smoothing": ("dpo", "simpo")}
        allowed |= {"desirable_weight": ("kto",), "undesirable_weight": ("kto",)}
        for name, losses in allowed.items():
            value = getattr(self, name)
            if self.loss not in losses and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"preference.{name}={value} with preference.loss={self.loss}: it belongs to "
                    f"{' and '.join(losses)}; leave it out"
                )
        return self


def check_preference(data: DataSection, pipeline: PipelineSection) -> None:
    """Raises ValueError for settings that don't go with pairs of answers."""
    for index, source in enumerate(data.all_sources):
        _check_source(source, "data" if data.sources is None else f"data.sources[{index}]")
    refused = {
        "data.packing=fixed": (data.packing == "fixed", "each answer is a sequence of its own length"),
        "data.streaming=true": (data.streaming, "the reference of all pairs is computed before the first step"),
        "pipeline.vocabulary=spread": (pipeline.vocabulary == "spread", "its loss needs all logits in one place"),
        "pipeline.router_loss=per_layer": (
            pipeline.router_loss != "none",
            "a router's share of a loss of pairs isn't defined",
        ),
    }
    for setting, (is_given, why) in refused.items():
        if is_given:
            raise ValueError(f"{setting} with preference: {why}; leave it out")


def _check_source(source: SourceSection, name: str) -> None:
    if not source.has_rows:
        raise ValueError(f"preference needs pairs; give {name}.dataset, a .jsonl or .parquet file or a name on the hub")
    if str(source.dataset).endswith(".txt"):
        raise ValueError(f"{name}.dataset={source.dataset} has lines and no pairs; give a .jsonl or .parquet file")
    for setting in _OF_OTHER_ROWS:
        value = getattr(source, setting)
        if value != SourceSection.model_fields[setting].default:
            raise ValueError(
                f"{name}.{setting}={value} with preference, whose rows have the columns prompt, chosen and rejected, "
                "and whose answers count; leave it out"
            )
