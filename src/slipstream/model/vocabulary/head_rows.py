"""Some rows of a head: their logits' softmax and gradients, and the loss that the parts of all ranks add up to.

With the rows W_r of rank r, l_r = log sum exp of its logits, and l = log sum exp l_r over the ranks, the loss of a
token is l - logit of its target, and its gradient for the head's input is sum_r c_r (softmax_r W_r) - W[target], where
c_r = exp(l_r - l). So each rank can compute its part before it knows the others' (Yeung et al. 2024, whose algorithm 2
this is).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.model.cross_entropy import IGNORED
from slipstream.model.saving.weight_gradients import add_product


class RowSoftmax(NamedTuple):
    """What a rank's rows say about the tokens of a slice; in evaluation the statistics alone.

    Statistics are (2, b, T): each token's l_r, and its target's logit (0 where the target's row is elsewhere). `mean`
    is softmax_r W_r and `target` W[target], zeros elsewhere, both (b, T, hidden).
    """

    statistics: Tensor
    mean: Tensor | None = None
    target: Tensor | None = None
    probabilities: Tensor | None = None  # (b, T, rows), which stay on this rank


class RowLosses(NamedTuple):
    """The loss of a slice over the whole vocabulary.

    `total` is the sum over valid tokens and `num_valid` their number, `logsumexp` (b, T) of all logits, and `gradient`
    (b, T, hidden) of the total for the head's input, None in evaluation.
    """

    total: Tensor
    num_valid: Tensor
    logsumexp: Tensor
    gradient: Tensor | None


class HeadRows(nn.Module):
    """The rows `ids` of an nn.Linear head. In the model's own forward it hands on what comes in.

    Its parameters have the rows `held` of the process: with all ranks in one process, the whole head.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, held: range, ids: range, num_ids: int) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.held, self.num_ids = held, num_ids
        self._first_id, self._rows = ids.start, slice(ids.start - held.start, ids.stop - held.start)

    @classmethod
    def of_stages(cls, head: nn.Linear, ids: Mapping[int, range]) -> dict[int, HeadRows]:
        """Returns the rows next to each stage of this process, copied from the whole head."""
        held = range(min(each.start for each in ids.values()), max(each.stop for each in ids.values()))

        def rows(whole: Tensor) -> nn.Parameter:
            return nn.Parameter(whole.detach()[held.start : held.stop].clone(), requires_grad=whole.requires_grad)

        biased: Tensor | None = head.bias  # torch says that there is one always
        weight, bias = rows(head.weight), None if biased is None else rows(biased)
        return {stage: cls(weight, bias, held, each, head.out_features) for stage, each in ids.items()}

    @property
    def share(self) -> float:
        """Its rows' share of those of the process."""
        return (self._rows.stop - self._rows.start) / len(self.held)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden

    @torch.no_grad()
    def softmax(self, hidden: Tensor, targets: Tensor, with_gradients: bool) -> RowSoftmax:
        """Runs V: returns the part of these rows, given the head's input (b, T, hidden) and targets (b, T)."""
        weight = self.weight[self._rows]
        logits = functional.linear(hidden, weight, None if self.bias is None else self.bias[self._rows])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (b, T, rows)
        index, is_here = self._places(targets)
        chosen = logits.gather(-1, index[..., None]).squeeze(-1).masked_fill(~is_here, 0)
        probabilities = logits.softmax(-1)
        # the largest probability is exp(largest logit - l_r): a pass over memory less than logsumexp needs
        statistics = torch.stack([logits.amax(-1) - probabilities.amax(-1).log(), chosen])
        if not with_gradients:
            return RowSoftmax(statistics)
        del logits
        mean = (probabilities.to(weight.dtype) @ weight).to(hidden.dtype)
        target = functional.embedding(index, weight).masked_fill(~is_here[..., None], 0).to(hidden.dtype)
        return RowSoftmax(statistics, mean, target, probabilities)

    @torch.no_grad()
    def add_gradients(self, hidden: Tensor, targets: Tensor, part: RowSoftmax, logsumexp: Tensor, scale: float) -> None:
        """Runs VW: adds the gradients of these rows, those of `scale` times the loss. It uses up the probabilities."""
        assert part.probabilities is not None
        index, is_here = self._places(targets)
        share = (part.statistics[0] - logsumexp).exp()  # c_r
        weights = share.masked_fill(targets == IGNORED, 0) * scale  # (b, T)
        of_logits = part.probabilities.mul_(weights[..., None])
        of_logits.scatter_add_(-1, index[..., None], -(is_here.to(of_logits.dtype) * scale)[..., None])
        rows = of_logits.to(hidden.dtype).flatten(0, 1)
        if self.weight.requires_grad:
            add_product(self.weight, rows, hidden.flatten(0, 1), self._rows)
        if self.bias is not None and self.bias.requires_grad:
            if self.bias.grad is None:
                self.bias.grad = torch.zeros_like(self.bias, dtype=self.bias.grad_dtype)
            self.bias.grad[self._rows].add_(rows.sum(0, dtype=self.bias.grad_dtype))

    def _places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each target's row here, 0 where it is elsewhere, and whether it is here; both (b, T)."""
        index = targets - self._first_id
        is_here = (targets != IGNORED) & (index >= 0) & (index < self._rows.stop - self._rows.start)
        return index.masked_fill(~is_here, 0), is_here


@torch.no_grad()
def combine(parts: Sequence[RowSoftmax], targets: Tensor, scale: float) -> RowLosses:
    """Runs L: returns the loss over all rows, with the gradient of `scale` times it for the head's input."""
    of_ranks, chosen = torch.stack([part.statistics for part in parts], 1)  # (ranks, b, T) each
    logsumexp = of_ranks.logsumexp(0)
    is_valid = targets != IGNORED
    loss = (logsumexp - chosen.sum(0)).masked_fill(~is_valid, 0).sum()
    gradient = None
    if parts[0].mean is not None:
        shares = (of_ranks - logsumexp).exp()[..., None]  # c_r
        gradient = torch.zeros_like(shares[0] * parts[0].mean)
        for share, part in zip(shares, parts, strict=True):
            assert part.mean is not None
            assert part.target is not None
            gradient.add_(share * part.mean).sub_(part.target)
        gradient = (gradient * scale).masked_fill(~is_valid[..., None], 0).to(parts[0].mean.dtype)
    return RowLosses(loss, is_valid.sum(), logsumexp, gradient)


class SpreadHead(NamedTuple):
    """A head that is spread: its name in the model, and a stage's rows of it, None where these are of another stage.

    `embedding` is the name of the embedding that shares the head's weight, "" where none does.
    """

    name: str
    rows: HeadRows | None
    embedding: str = ""
