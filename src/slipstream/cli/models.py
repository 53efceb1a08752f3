"""`slipstream export`, `eval` and `generate`: commands on the model of a checkpoint or folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from slipstream.cli.options import Best, TrustRemoteCode, amount, count
from slipstream.errors import SlipstreamError
from slipstream.terminal import make_console
from slipstream.units import plural


def export(
    checkpoint: Annotated[Path, Argument(help="A run's output folder, or one of its checkpoints.")],
    output: Annotated[Path, Option(help="The folder to write to: a new or empty one.")],
    step: Annotated[
        str | None,
        Option(
            help="Which checkpoint of a run: a step, latest, or last-good, which skips damaged ones. Default: latest."
        ),
    ] = None,
    best: Best = False,
    remote_code: TrustRemoteCode = False,
) -> None:
    """Write the whole model of CHECKPOINT and its tokenizer, as transformers loads them.

    Runs in one process, whichever mesh trained the model.
    """
    from slipstream.launch import Progress
    from slipstream.train.export import check_export_folder, choose_checkpoint, export_checkpoint

    progress = Progress(make_console())
    chosen = choose_checkpoint(checkpoint, step, best)
    check_export_folder(output, chosen.run)
    with progress.waiting("reading the checkpoint"):
        saved = chosen.read(progress.warn)
        export_checkpoint(chosen.run, saved, output, remote_code)
    progress.say_result(f"exported step {saved.step} of {chosen.run.path} to {output}")


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
    column: Annotated[str | None, Option(help="The column of the table that holds the documents.")] = None,
    seq_len: Annotated[
        int | None,
        count(
            "Cut documents that are longer than this many tokens. Default: the run's training.seq_len, or the "
            "model's longest."
        ),
    ] = None,
    slice_len: Annotated[int, count("Tokens to compute at a time; more take more memory.")] = 1024,
    reference: Annotated[
        str | None,
        Option(help="With preferences: the reference model. Default: the model the run started from."),
    ] = None,
    best: Best = False,
    remote_code: TrustRemoteCode = False,
) -> None:
    """Show MODEL's loss on FILE, with the perplexity of text and samples and the rewards of pairs of answers.

    For a run, uses its exported model, else its newest checkpoint, and reports its validation's figures, with the run's
    sections data and preference. Any of their settings can be given: --data.loss=all --preference.beta=0.2. Runs in one
    process.
    """
    settings = [*context.args]
    if stray := next((setting for setting in settings if not setting.startswith("--")), None):
        raise SlipstreamError(f"{stray!r} is an unexpected argument; write settings as --data.loss=all")
    if stray := next((setting for setting in settings if not setting.startswith(("--data.", "--preference."))), None):
        raise SlipstreamError(
            f"`slipstream eval` doesn't take {stray}: give settings of data and preference, such as "
            "--data.loss=all, or see `slipstream eval --help`"
        )
    from slipstream.train.config import read_settings

    # Misspelt settings are reported here, before torch is imported.
    read_settings(settings)
    from slipstream.launch import Progress
    from slipstream.train.evaluation import EvaluationRequest, PairLoss, evaluate_model
    from slipstream.train.export import opened_model
    from slipstream.train.preferences import describe_rewards

    progress = Progress(make_console())
    if column is not None:
        settings.append(f"--data.text_column={column}")
    with opened_model(model, remote_code, progress, best) as opened:
        evaluation = evaluate_model(opened, EvaluationRequest(file, seq_len, slice_len, settings, reference), progress)
    if isinstance(evaluation, PairLoss):
        pairs = plural(evaluation.num_pairs, "pair")
        progress.say_result(f"evaluated: {pairs}, {describe_rewards(evaluation.rewards)}")
        progress.say_result(f"loss: {evaluation.loss:.4f} per pair")
        return
    progress.say_result(f"evaluated: {plural(evaluation.num_tokens, 'token')}, {evaluation.num_predicted:,} predicted")
    progress.say_result(f"loss: {evaluation.loss:.4f} nats per token, perplexity {evaluation.perplexity:.2f}")


def generate(
    model: Annotated[
        str, Argument(help="A model's folder or hub name, a run's output folder, or one of its checkpoints.")
    ],
    prompt: Annotated[str, Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, count("The largest number of tokens to generate.")] = 64,
    temperature: Annotated[float, amount("Sampling temperature; 0 always takes the most likely token.")] = 0,
    seed: Annotated[int, Option(help="Random seed for sampling.")] = 0,
    chat: Annotated[
        bool, Option("--chat", help="Print what the assistant answers to PROMPT, by the model's chat template.")
    ] = False,
    chat_template: Annotated[
        str | None,
        Option(help="With --chat: the name of a chat template, such as chatml, or its file. Default: the model's own."),
    ] = None,
    best: Best = False,
    remote_code: TrustRemoteCode = False,
) -> None:
    """Print PROMPT as MODEL continues it.

    For a run, uses its exported model, else its newest checkpoint. Runs in one process.
    """
    if chat_template is not None and not chat:
        raise SlipstreamError(f"--chat-template={chat_template} is for a chat; add --chat, or leave it out")
    import torch

    from slipstream.launch import Progress
    from slipstream.train.export import TextWriter, opened_model

    progress = Progress(make_console(stderr=True))
    with opened_model(model, remote_code, progress, best) as opened:
        writer = TextWriter.load(opened, "cuda" if torch.cuda.is_available() else "cpu", chat_template)
        writer.check(prompt, max_new_tokens, chat)
        if doubled := writer.warning(prompt, chat):
            progress.warn(f"{doubled}; leave it out there")
        print(writer.write(prompt, max_new_tokens, temperature, seed, chat))
