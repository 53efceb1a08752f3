"""Teaches a Transformer T(L, H, A) to translate snake_case to camelCase, on one process or several:

python examples/gpipe/train_translation.py
torchrun --nproc-per-node=2 examples/gpipe/train_translation.py --layers 4 --microbatches 8 --schedule 1f1b
torchrun --nproc-per-node=2 examples/gpipe/train_translation.py --microbatches 1 --slices 4
"""

from __future__ import annotations

import argparse

import torch
from loop import Batch, add_arguments, run
from torch import Tensor, nn
from torch.nn import functional
from transformer import transformer
from translation_task import VOCABULARY, decode, encode, sentences


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sum over tokens, their number) of logits (b, T, vocabulary) and targets (b, T), -100 for none."""
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def main() -> None:
    arguments = _arguments()
    names = sentences()
    held_out, trained = names[:512], names[512:]
    generator = torch.Generator().manual_seed(arguments.seed)

    def next_batch() -> Batch:
        chosen = torch.randint(len(trained), (arguments.batch,), generator=generator)
        return encode([trained[i] for i in chosen])

    def exact_matches(model: nn.Sequential) -> str:
        """Says how many names greedy decoding gets right: each letter must follow from the right ones before it."""
        inputs, targets = encode(held_out)
        answers = model(inputs).argmax(dim=2)  # (b, T)
        right = ((answers == targets) | (targets == -100)).all(dim=1).float().mean()
        return f"{right:.1%} of {len(held_out)} held-out names right; {held_out[0]} -> {decode(answers[0])}"

    run(lambda: _build(arguments), next_batch, exact_matches, token_loss, arguments, arguments.slices)


def _build(arguments: argparse.Namespace) -> nn.Sequential:
    width = arguments.width
    return transformer(
        arguments.layers,
        arguments.hidden,
        arguments.heads,
        vocabulary=VOCABULARY,
        width=width,
        head_width=width // arguments.heads,
        clip=arguments.clip,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, metavar="L", help="of the encoder, and of the decoder")
    parser.add_argument("--hidden", type=int, default=256, metavar="H", help="feed-forward channels")
    parser.add_argument("--heads", type=int, default=4, metavar="A")
    parser.add_argument("--width", type=int, default=64, help="hidden channels")
    parser.add_argument("--clip", type=float, default=20.0, help="the largest magnitude of a logit")
    parser.add_argument("--slices", type=int, default=1, help="of the decoder's tokens")
    add_arguments(parser, steps=400, batch=64, lr=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
