"""`slipstream eval`: the loss of a model on a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from slipstream.cli.model_options import Best, TrustRemoteCode
from slipstream.cli.number_options import count
from slipstream.terminal import make_console


def evaluate(
    model: Annotated[
        str, Argument(help="A model's folder or hub name, a run's output folder, or one of its checkpoints.")
    ],
    file: Annotated[
        Path, Argument(help="A text, which is one document, or a .jsonl, .json or .parquet table of them.")
    ],
    column: Annotated[str, Option(help="The table's column that holds the documents.")] = "text",
    seq_len: Annotated[
        int | None, count("Tokens at which a document is cut. Default: the longest sequence of the model.")
    ] = None,
    slice_len: Annotated[int, count("The most tokens to compute at a time; more need more memory.")] = 1024,
    best: Best = False,
    remote_code: TrustRemoteCode = False,
) -> None:
    """Show MODEL's loss and perplexity on the text of FILE.

    Of a run, its exported model is taken, else its newest checkpoint. Runs in this process alone.
    """
    from slipstream.launch import Progress
    from slipstream.training.exports import measure_text_loss, opened_model, read_text

    progress = Progress(make_console())
    with opened_model(model, remote_code, progress, best) as opened:
        text = read_text(file, column, opened.tokenizer, progress)
        found = measure_text_loss(opened.path, text, seq_len, slice_len, progress)
    noun = "document" if text.num_documents == 1 else "documents"
    progress.say_result(
        f"text: {text.num_documents:,} {noun}, {found.num_tokens:,} tokens, {found.num_predicted:,} predicted"
    )
    progress.say_result(f"loss: {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}")
