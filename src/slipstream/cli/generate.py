"""`slipstream generate`: a text that a model continues."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from slipstream.cli.model_options import Best, TrustRemoteCode
from slipstream.cli.number_options import amount, count
from slipstream.terminal import make_console


def generate(
    model: Annotated[
        str, Argument(help="A model's folder or hub name, a run's output folder, or one of its checkpoints.")
    ],
    prompt: Annotated[str, Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, count("The most tokens to write.")] = 64,
    temperature: Annotated[
        float, amount("0: the likeliest token each time. Above: drawn, more freely the higher.")
    ] = 0,
    seed: Annotated[int, Option(help="Of what is drawn.")] = 0,
    best: Best = False,
    remote_code: TrustRemoteCode = False,
) -> None:
    """Print PROMPT as MODEL continues it.

    Of a run, its exported model is taken, else its newest checkpoint. Runs in this process alone.
    """
    import torch

    from slipstream.launch import Progress
    from slipstream.training.exports import TextWriter, opened_model

    with opened_model(model, remote_code, Progress(make_console(stderr=True)), best) as opened:
        writer = TextWriter.load(opened, "cuda" if torch.cuda.is_available() else "cpu")
        writer.check(prompt, max_new_tokens)
        print(writer.write(prompt, max_new_tokens, temperature, seed))
