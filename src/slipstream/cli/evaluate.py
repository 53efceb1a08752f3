"""`slipstream eval`: the loss of a model on held-out data."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Context, Option

from slipstream.cli.model_options import Best, TrustRemoteCode
from slipstream.cli.number_options import count
from slipstream.errors import SlipstreamError
from slipstream.terminal import make_console


def evaluate(
    context: Context,
    model: Annotated[
        str, Argument(help="A model's folder or hub name, a run's output folder, or one of its checkpoints.")
    ],
    file: Annotated[
        str | None,
        Argument(
            help="A text, which is one document; a .jsonl, .json, .csv or .parquet table of documents, conversations, "
            "completions or pairs of answers; or a split of the run's data set. Default: what the run held out."
        ),
    ] = None,
    column: Annotated[str | None, Option(help="The table's column that holds the documents.")] = None,
    seq_len: Annotated[
        int | None,
        count("Tokens at which a document is cut. Default: the run's training.seq_len, or the model's longest."),
    ] = None,
    slice_len: Annotated[int, count("The most tokens to compute at a time; more need more memory.")] = 1024,
    reference: Annotated[
        str | None,
        Option(help="With preferences: the model that rewards are relative to. Default: the one the run began with."),
    ] = None,
    best: Best = False,
    remote_code: TrustRemoteCode = False,
) -> None:
    """Show MODEL's loss on FILE: of text and samples with its perplexity, of pairs of answers with their rewards.

    Of a run, its exported model is taken, else its newest checkpoint, and the loss is what its validation reports: with
    the run's sections data and preference. Any of their settings can be given: --data.loss=all --preference.beta=0.2.
    Runs in this process alone.
    """
    from slipstream.launch import Progress
    from slipstream.training.exports import EvaluationRequest, PairLoss, evaluate_model, opened_model
    from slipstream.training.preferences import describe_rewards

    progress, settings = Progress(make_console()), [*context.args]
    if stray := next((each for each in settings if not each.startswith("--")), None):
        raise SlipstreamError(f"{stray!r} is one argument too many; settings are given as --data.loss=all")
    if column is not None:
        settings.append(f"--data.text_column={column}")
    with opened_model(model, remote_code, progress, best) as opened:
        found = evaluate_model(opened, EvaluationRequest(file, seq_len, slice_len, settings, reference), progress)
    if isinstance(found, PairLoss):
        progress.say_result(f"evaluated: {found.num_pairs:,} pairs, {describe_rewards(found.rewards)}")
        progress.say_result(f"loss: {found.loss:.4f} per pair")
        return
    progress.say_result(f"evaluated: {found.num_tokens:,} tokens, {found.num_predicted:,} predicted")
    progress.say_result(f"loss: {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}")
