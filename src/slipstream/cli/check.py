"""`slipstream check`: how a model can be split, and whether it can be trained in token slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit

from slipstream.cli.options import TrustRemoteCode
from slipstream.terminal import print_table, spinner

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.cluster_plans.described_model import DescribedModel
    from slipstream.cluster_plans.model_report import ModelReport


def check(
    model: Annotated[
        str, Argument(help="A model's folder, hub name, config.json, or a training configuration (.yaml).")
    ],
    remote_code: TrustRemoteCode = False,
) -> None:
    """Show how MODEL can be split, and compare a sliced and an unsliced toy of its architecture: exact or not, and why.

    It also names the tokenizer, and with a training configuration gives a run's warnings about the turns of its first
    conversations. Of one with a single rank it says the slices, what a step holds with them, the memory of this
    machine, and what to type where it doesn't fit.

    Exits with 0 if the model can be trained in token slices, and with 1 if it can't, or if a training configuration
    names no tokenizer that can be used.
    """
    with spinner("running a toy of the architecture"):
        from slipstream.cluster_plans.described_model import DescribedModel
        from slipstream.cluster_plans.model_report import report_on

        described = DescribedModel(model, trusts_code=remote_code)
        report = report_on(described.config)
    if report.kinds:
        print_table(_layers(report))
    preference = described.settings.get("preference")
    if isinstance(preference, dict) and not preference.get("dropout"):
        report = replace(report, dropout=())
    facts = _facts(report)
    rows, is_ready = _run_rows(model, described) if described.is_run else _tokenizer_rows(model, remote_code)
    for name, text in rows:
        facts.add_row(name, text)
    print_table(facts)
    if report.refusal or not is_ready:
        raise Exit(1)


_Rows = list[tuple[str, str]]


def _tokenizer_rows(model: str, trusts_code: bool) -> tuple[_Rows, bool]:
    """Returns a row on the tokenizer in a model's folder, and that a model by itself needs none."""
    from slipstream.errors import SlipstreamError
    from slipstream.train.data import load_tokenizer

    if Path(model).is_file():
        return [], True
    try:
        with spinner("reading the tokenizer"):
            return [("tokenizer", f"{len(load_tokenizer(model, trusts_code)):,} tokens")], True
    except SlipstreamError as error:
        return [("tokenizer", str(error))], True


def _run_rows(file: str, described: DescribedModel) -> tuple[_Rows, bool]:
    """Returns rows on the tokenizer and the conversations of a training, and whether it has a tokenizer to use."""
    from slipstream.errors import SlipstreamError
    from slipstream.train.config import load_config
    from slipstream.train.model_files import ModelFiles
    from slipstream.train.preflight import check_turns, lone_rank_facts

    try:
        config = load_config(Path(file))
    except SlipstreamError as error:
        return [("turns", f"not checked: {error}")], True
    files = ModelFiles(config, described.config)
    with spinner("counting what a step holds"):
        rows = [*lone_rank_facts(config, described.config)]
    try:
        with spinner("reading the tokenizer"):
            tokenizer = files.tokenizer
    except SlipstreamError as error:
        return [*rows, ("tokenizer", str(error))], False
    rows.append(("tokenizer", "trained on the text" if tokenizer is None else f"{len(tokenizer):,} tokens"))
    try:
        with spinner("reading conversations"):
            problems = check_turns(config, files)
    except SlipstreamError as error:
        return [*rows, ("turns", f"not checked: {error}")], True
    if problems is not None:
        problems = problems or ["those that count have an end, and none has an empty <think> block"]
        rows += [("turns", problem) for problem in problems]
    return rows, True


def _layers(report: ModelReport) -> Table:
    """Returns the kinds of layers, which layers are of each, and how they read earlier tokens."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("layers", "kind", "read from earlier tokens", box=SIMPLE_HEAD, pad_edge=False)
    for kind in report.kinds:
        table.add_row(_ranges(kind.layers), kind.name, _path_text(kind.paths))
    return table


def _path_text(paths: frozenset[str] | None) -> str:
    if paths is None:
        return "not compared"
    names = {
        "attention": "keys and values (attention over the context store)",
        "own attention": "keys and values (the model's own attention, over copies of all so far)",
    }
    return ", ".join(names.get(path, f"a state that slices carry ({path})") for path in sorted(paths)) or (
        "nothing: each token by itself"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Returns whole numbers in order as ranges: 0-2, 5."""
    runs = [[index for _, index in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _facts(report: ModelReport) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in _rows(report):
        table.add_row(name, text)
    return table


def _rows(report: ModelReport) -> Iterator[tuple[str, str]]:
    """Yields the rows of the report: name and text."""
    from slipstream.options import SHARED_WORK
    from slipstream.units import count_text, plural

    size = "" if report.num_parameters is None else f", {count_text(report.num_parameters)} parameters"
    yield "model", f"{report.model_type}{size}"
    if report.kinds:
        yield "stages", _stages(report)
        for each in SHARED_WORK:
            if each.splits_weights or not report.refusal:
                yield f"{each.choice.replace('_', ' ')}ism", str(report.sharing[each.degree])
        yield "tied weights", ", ".join(f"{head} = {embedding}" for head, embedding in report.tied) or "none"
    yield "loss", _loss(report)
    if report.dropout:
        yield "dropout", f"{', '.join(report.dropout)}: replayed exactly; other slices draw other numbers"
    if report.max_length:
        yield "longest sequence", f"{report.max_length:,} tokens"
    if (trial := report.self_check) is not None:
        packed = "of any length" if trial.longest_packed == float("inf") else f"up to {trial.longest_packed:,} tokens"
        yield (
            "packed documents",
            packed if trial.longest_packed else "refused: positions count from the sequence's start",
        )
        yield (
            "token slices",
            f"exact: largest relative difference {trial.output_error:.0e} in outputs, {trial.gradient_error:.0e} in "
            f"gradients ({plural(trial.num_layers, 'layer')}, float64, {trial.seconds:.1f} s)",
        )
    if report.refusal:
        yield "token slices", f"refused: {report.refusal}"


def _stages(report: ModelReport) -> str:
    whole = f"up to {report.num_layers} of whole layers"
    return (
        f"{whole}; {report.whole_layers}" if report.whole_layers else f"{whole}, {2 * report.num_layers} of half layers"
    )


def _loss(report: ModelReport) -> str:
    from slipstream.model import LabelLoss

    ours = "cross-entropy of each token's logits with the next token"
    if report.label_loss is LabelLoss.NEXT:
        return f"{ours}, as transformers computes it"
    return f"{ours}; transformers' own loss compares with {report.label_loss.value}"
