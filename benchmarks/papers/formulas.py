"""The papers' counts of a GPT's operations, and their formulas of idle time, with which tests compare the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import SlipstreamError

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class GPT:
    """A GPT as in PTD-P's Table 1: l layers, hidden size h, vocabulary V, sequences of S tokens.

    Its MLP has four hidden sizes, positions are learned and embeddings tied. Plans count a model's operations instead.
    """

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


def bubble_fraction(num_ranks: int, num_microbatches: int, num_slices: int = 1, stages_per_rank: int = 1) -> float:
    """Returns idle over ideal time, (p-1)/(m s v): PTD-P section 2.2, TeraPipe's slices as further microbatches."""
    _check_positive(
        num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=num_slices, stages_per_rank=stages_per_rank
    )
    return (num_ranks - 1) / (num_microbatches * num_slices * stages_per_rank)


def idle_share(num_ranks: int, num_microbatches: int, num_slices: int = 1, stages_per_rank: int = 1) -> float:
    """Returns idle over all time, (p-1)/(m s v + p-1): GPipe section 2.3 for s = v = 1."""
    bubble = bubble_fraction(num_ranks, num_microbatches, num_slices, stages_per_rank)
    return bubble / (1 + bubble)


def batch_seconds(
    num_ranks: int, num_microbatches: int, forward: float, backward: float, stages_per_rank: int = 1
) -> float:
    """PTD-P eq. 1, (b'/b + p-1)(t_f + t_b), a rank's times of one microbatch, with v stages a rank."""
    bubble = bubble_fraction(num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
    return num_microbatches * (1 + bubble) * (forward + backward)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise SlipstreamError(f"{name}={value}: give a number above 0.")
