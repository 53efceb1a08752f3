"""The values that travel with the tokens of a step's sequences: token ids, labels, positions, documents, further ones.

Whatever cuts, packs, pads, shares or compares a batch goes by the rule of each and knows none by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.model import IGNORED

Rows = Tensor | list[Tensor]  # rows of one length, or a list of rows of any length


@dataclass(frozen=True)
class TokenRule:
    """How values of one kind are packed, padded and cut with their tokens.

    Values of every kind are compared between ranks by name, shape, dtype and contents, and ranks that share a slice get
    those of their tokens.

    Args:
        name: of the kind, in messages too; no two kinds of a batch have one name.
        fill: the value of an added token, which counts nowhere.
        fill_step: how much more each further added token of a sequence has.
        is_shifted: whether values at t belong to the prediction of the label at t, and so go to the token before it.
        ends_with_sequence: whether runs of equal values tell documents, of which none runs on into the next sequence of
            a row.
        num_dims: the dims of one token's value.
    """

    name: str
    fill: float = 0
    fill_step: float = 0
    is_shifted: bool = False
    ends_with_sequence: bool = False
    num_dims: int = 0


INPUTS = TokenRule("inputs")
LABELS = TokenRule("labels", fill=IGNORED, is_shifted=True)
POSITIONS = TokenRule("position_ids", fill_step=1)
DOCUMENTS = TokenRule("document_ids", ends_with_sequence=True)


@dataclass(frozen=True)
class TokenValues:
    """The values of one kind of a step's sequences: (B, T, ...) where these have one length, else a list with (T, ...)
    of each."""

    rule: TokenRule
    rows: Rows

    def padded(self, num_tokens: Sequence[int]) -> TokenValues:
        """Returns a list with further sequences of added tokens, as long as `num_tokens` says."""
        return replace(self, rows=[*self.rows, *map(self._added, num_tokens)])

    def packed(self, group: Sequence[int]) -> TokenValues:
        """Returns the row (1, T, ...) of these sequences, one after the other."""
        pieces = [self.rows[index] for index in group]
        if self.rule.ends_with_sequence:
            # The last value of a sequence differs from the first of the next.
            pieces = [2 * piece + place % 2 for place, piece in enumerate(pieces)]
        return replace(self, rows=(torch.cat(pieces) if len(pieces) > 1 else pieces[0])[None])

    def _added(self, num_tokens: int) -> Tensor:
        like = self.rows[0]
        places = torch.arange(num_tokens, device=like.device).view(-1, *[1] * (like.dim() - 1))
        values = self.rule.fill + self.rule.fill_step * places
        return values.to(like.dtype).expand(num_tokens, *like.shape[1:])


def document_numbers(position_ids: Tensor) -> Tensor:
    """Returns the number of each token's document, (..., T): a new one begins where positions don't count on."""
    numbers = torch.zeros_like(position_ids)
    numbers[..., 1:] = (position_ids[..., 1:] != position_ids[..., :-1] + 1).cumsum(-1)
    return numbers
