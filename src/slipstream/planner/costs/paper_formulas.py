"""The parameters and FLOPs of a GPT, and how long its training takes, by the closed formulas of the PTD-P paper.

They hold for a GPT with an MLP of four hidden sizes, learned positions and tied embeddings. Plans count a model's
operations instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import SlipstreamError

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class GPT:
    """A GPT as in PTD-P's Table 1: l layers, hidden size h, vocabulary V, sequences of S tokens."""

    num_layers: int
    hidden_size: int
    vocab_size: int = 51200
    seq_len: int = 2048

    def __post_init__(self) -> None:
        _check_positive(
            num_layers=self.num_layers, hidden_size=self.hidden_size, vocab_size=self.vocab_size, seq_len=self.seq_len
        )

    @property
    def num_parameters(self) -> float:
        """The number of parameters, PTD-P eq. 2: P = 12 l h² (1 + 13/(12h) + (V+S)/(12 l h))."""
        layers, hidden = self.num_layers, self.hidden_size
        ends = (self.vocab_size + self.seq_len) / (12 * layers * hidden)
        return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + ends)

    def flops(self, batch_size: int, recompute: bool = True) -> float:
        """Returns the FLOPs of one iteration over B sequences, PTD-P eq. 3: F = 96 B S l h² (1 + S/(6h) + V/(16 l h)).

        The layers are computed four times: forward, recomputation, and backward at twice the forward; the head three
        times. Without recomputation both are computed three times: 72 B S l h² (1 + S/(6h) + V/(12 l h)).
        """
        _check_positive(batch_size=batch_size)
        layers, hidden = self.num_layers, self.hidden_size
        layer_passes = 4 if recompute else 3
        tokens = batch_size * self.seq_len
        in_layers = 24 * layers * hidden**2 * (1 + self.seq_len / (6 * hidden))
        in_head = 2 * hidden * self.vocab_size
        return tokens * (layer_passes * in_layers + 3 * in_head)


def training_seconds(num_tokens: float, num_parameters: float, num_devices: int, flops_per_second: float) -> float:
    """Returns the seconds of training on T tokens, 8TP/(nX) (PTD-P section 5.1, with recomputation).

    X is the FLOP/s that one device achieves.
    """
    _check_positive(
        num_tokens=num_tokens, num_parameters=num_parameters, num_devices=num_devices, flops_per_second=flops_per_second
    )
    return 8 * num_tokens * num_parameters / (num_devices * flops_per_second)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise SlipstreamError(f"{name}={value}: give a number above 0.")
