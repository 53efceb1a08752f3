"""The head, and an embedding tied to it, whose rows are spread over the ranks of a pipeline: one row for each id.

With the rows W_r of rank r, l_r = log sum exp of its logits, and l = log sum exp l_r over the ranks, the loss of a
token is l - logit of its target, and its gradient for the head's input is sum_r c_r (softmax_r W_r) - W[target], where
c_r = exp(l_r - l). So each rank can compute its part before it knows the others' (Yeung et al. 2024, whose algorithm 2
this is).

Where the head's weight embeds too, each rank looks up the tokens whose rows it has, zeros for the others, and the sum
over the ranks is the whole embedding's output (Yeung et al. 2024, on the input layer). The gradients of head and
embedding add up in the rank's own rows, so that nothing is exchanged at the end of a step.

Whether an architecture's head can be spread shows when a toy of it runs once: some models scale or cap the head's
output, which no rank could do alone, and the embedding must be looked up once, for the tokens, in that weight alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.anatomy import ModelAnatomy
from slipstream.model.cross_entropies import IGNORED
from slipstream.model.cutting import EmptyEmbedding
from slipstream.model.hooks.module_calls import ModuleCall, recorded_calls
from slipstream.model.hooks.token_slice import current_slice
from slipstream.model.own_code import runs_class_code
from slipstream.model.toy import toy_model, toy_tokens
from slipstream.model.weight_gradients import add_product, add_rows, gradient_of


class RowSoftmax(NamedTuple):
    """A rank's softmax over its rows for the tokens of a slice; in evaluation the statistics alone.

    Statistics are (2, b, T): each token's l_r, and its target's logit (0 where the target's row is elsewhere). `mean`
    is softmax_r W_r and `target` W[target], zeros elsewhere, both (b, T, hidden).
    """

    statistics: Tensor
    mean: Tensor | None = None
    target: Tensor | None = None
    probabilities: Tensor | None = None  # (b, T, rows), for this rank's rows only


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
    """The rows `ids` of an nn.Linear head, or of a matrix that is both head and embedding.

    In the model's own forward it hands on its input. Its parameters have the rows `held` of the process: with all ranks
    in one process, the whole head. The row of the id `padding_idx` gets no gradient from lookups.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        held: range,
        ids: range,
        num_ids: int,
        padding_idx: int | None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.padding_idx = padding_idx
        self.held = held
        self.num_ids = num_ids
        self._first_id = ids.start
        self._rows = slice(ids.start - held.start, ids.stop - held.start)

    @classmethod
    def of_stages(
        cls, head: nn.Linear, ids: Mapping[int, range], embedding: nn.Module | None = None
    ) -> dict[int, HeadRows]:
        """Returns the rows next to each stage of this process, copied from the whole head, and embedding if tied."""
        held = range(min(rows.start for rows in ids.values()), max(rows.stop for rows in ids.values()))

        def rows(whole: Tensor) -> nn.Parameter:
            return nn.Parameter(whole.detach()[held.start : held.stop].clone(), requires_grad=whole.requires_grad)

        # torch's annotations say that there always is a bias.
        biased: Tensor | None = head.bias
        weight = rows(head.weight)
        bias = None if biased is None else rows(biased)
        padding_idx = getattr(embedding, "padding_idx", None)
        return {stage: cls(weight, bias, held, part, head.out_features, padding_idx) for stage, part in ids.items()}

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
            gradient_of(self.bias)[self._rows].add_(rows.sum(0, dtype=self.bias.grad_dtype))

    @torch.no_grad()
    def look_up(self, ids: Tensor) -> Tensor:
        """Runs E: returns the rows of those of the ids (b, T) that are here, zeros for others; (b, T, hidden)."""
        index, is_here = self._places(ids)
        return functional.embedding(index, self.weight[self._rows]).masked_fill(~is_here[..., None], 0)

    @torch.no_grad()
    def add_lookups(self, ids: Tensor, gradient: Tensor) -> None:
        """Runs EW: adds the gradient (b, T, hidden) of the embeddings of the ids (b, T)."""
        if not self.weight.requires_grad:
            return
        index, is_here = self._places(ids)
        if self.padding_idx is not None:
            is_here = is_here & (ids != self.padding_idx)
        here = gradient.masked_fill(~is_here[..., None], 0)
        add_rows(self.weight, (index + self._rows.start).flatten(), here.flatten(0, 1))

    def _places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each target's row here, 0 where it is elsewhere, and whether it is here; both (b, T)."""
        index = targets - self._first_id
        is_here = (targets != IGNORED) & (index >= 0) & (index < self._rows.stop - self._rows.start)
        return index.masked_fill(~is_here, 0), is_here


@torch.no_grad()
def combine_softmax(parts: Sequence[RowSoftmax], targets: Tensor, scale: float) -> RowLosses:
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


class SpreadEmbedding(EmptyEmbedding):
    """Replaces an embedding whose rows are spread: on the first stage it hands on the sum of all ranks' embeddings,
    after the steps of the model's own class that follow its lookup, such as scaling. On a stage next to which this rank
    has its rows, it has their weight, under its name in the unsplit model.
    """

    def __init__(self, original: Any, rows: HeadRows | None, is_first: bool) -> None:
        super().__init__(original, original.embedding_dim, original.weight.dtype, original.weight.device)
        self._is_first = is_first
        if is_first and type(original) is not nn.Embedding:
            del original.weight
            original.register_buffer("weight", self.weight, persistent=False)
            # padding_idx is a token id, and the embeddings that come here aren't looked up by id.
            original.padding_idx = None
            self.own = original
        if rows is not None:
            del self.weight
            self.weight = rows.weight

    def forward(self, ids: Tensor | Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
        if not self._is_first:
            shape = ids.shape if isinstance(ids, Tensor) else ids
            return self.weight.new_zeros(()).expand(*shape, self.embedding_dim)
        looked_up = current_slice().hidden
        assert looked_up is not None
        return self.of_looked_up(looked_up)

    def of_looked_up(self, looked_up: Tensor) -> Tensor:
        """Returns the whole embedding's output, both (b, T, hidden)."""
        if not hasattr(self, "own"):
            return looked_up
        places = torch.arange(looked_up[..., 0].numel(), device=looked_up.device).view(looked_up.shape[:-1])
        output: Tensor = functional_call(self.own, {"weight": looked_up.flatten(0, -2)}, (places,))
        return output


@dataclass(frozen=True)
class TiedWeight:
    """A weight that other stages may hold, too (rule 11).

    `parameter` has the canonical name. `accumulators` are the parameters, over the same storage, in which this stage's
    backwards leave gradients: of an embedding that is the head, one for each of the two, so that these can be added in
    one fixed order whatever the number of stages; of one that several layers share, `parameter` alone.
    """

    name: str
    parameter: nn.Parameter
    accumulators: tuple[nn.Parameter, ...]


def separate_head(model: PreTrainedModel, anatomy: ModelAnatomy, is_first: bool, is_last: bool) -> list[TiedWeight]:
    """Returns the tied weights of a stage, whose head gets a separate accumulator."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = []
    for head_name, name in anatomy.tied:
        if name not in parameters:
            # Neither the embedding nor the head is on this stage.
            continue
        accumulators = [parameters[name]] if is_first else []
        if is_last:
            head = nn.Parameter(parameters[name].detach(), requires_grad=parameters[name].requires_grad)
            module, _, attribute = head_name.rpartition(".")
            setattr(model.get_submodule(module), attribute, head)
            accumulators.append(head)
        tied.append(TiedWeight(name, parameters[name], tuple(accumulators)))
    return tied


def shared_weights(model: PreTrainedModel, anatomy: ModelAnatomy) -> list[TiedWeight]:
    """Returns the weights of a stage that several layers share, which may be other stages'."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    here = ((names[0], next((name for name in names if name in parameters), None)) for names in anatomy.shared)
    return [TiedWeight(name, parameters[key], (parameters[key],)) for name, key in here if key is not None]


class HeadNames(NamedTuple):
    """The names of a head, such as "lm_head", and of the embedding that has the same weight, "" where none has."""

    head: str
    embedding: str


def find_spreadable_head(config: PretrainedConfig, anatomy: ModelAnatomy) -> HeadNames:
    """Returns the names of head and tied embedding. Raises SlipstreamError, saying why, where they can't be spread."""
    model: Any = toy_model(config)
    head = model.get_output_embeddings()
    tokens = toy_tokens(config)
    name = next((name for name in anatomy.after if model.get_submodule(name) is head), None)
    if type(head) is not nn.Linear or name is None:
        kind = type(head).__name__
        raise _refusal(f"the head of model_type {config.model_type!r} is a {kind}, not an nn.Linear")
    embedding = _tied_embedding(model, name, anatomy) if anatomy.tied else ""
    obstacle = anatomy.obstacle((name, embedding))
    if not runs_class_code(head):
        obstacle = "nn.Linear has another forward than PyTorch's"
    if obstacle:
        raise _refusal(f"{obstacle}, and rows of a head are multiplied by other code. Give vocabulary='whole'")
    with (
        torch.no_grad(),
        recorded_calls({key: model.get_submodule(key) for key in (name, embedding) if key}) as calls,
    ):
        logits = model(input_ids=tokens, use_cache=False).logits
    outputs = [call.output for call in calls if call.name == name]
    if len(outputs) != 1 or logits.data_ptr() != outputs[0].data_ptr() or logits.shape != outputs[0].shape:
        raise _refusal(f"model_type {config.model_type!r} changes what its head returns, such as by a scale or a cap")
    lookups = [call for call in calls if call.name == embedding]
    if embedding and not _only_looks_up(model.get_submodule(embedding), lookups, tokens):
        raise _refusal(f"{embedding} of model_type {config.model_type!r} does more than look up the tokens' rows")
    return HeadNames(name, embedding)


def _tied_embedding(model: Any, head: str, anatomy: ModelAnatomy) -> str:
    """Returns the name of the embedding of tokens, which shares its one weight with the head."""
    embedding = model.get_input_embeddings()
    name = next((name for name in anatomy.before if model.get_submodule(name) is embedding), None)
    if name is None or anatomy.tied != ((f"{head}.weight", f"{name}.weight"),):
        shared = ", ".join(" with ".join(pair) for pair in anatomy.tied)
        raise _refusal(f"model_type {model.config.model_type!r} shares {shared}, not its head with its token embedding")
    if not isinstance(embedding, nn.Embedding) or [*embedding.state_dict()] != ["weight"]:
        raise _refusal(f"{name} is a {type(embedding).__name__}, not an nn.Embedding with only a weight")
    if embedding.max_norm or embedding.scale_grad_by_freq or embedding.sparse:
        raise _refusal(f"{name} has max_norm, scale_grad_by_freq or sparse")
    return name


def _only_looks_up(embedding: nn.Module, lookups: Sequence[ModuleCall], tokens: Tensor) -> bool:
    """Returns whether one lookup was made, and its output follows from the tokens' rows alone."""
    if len(lookups) != 1 or len(lookups[0].args) != 1 or not torch.equal(lookups[0].args[0], tokens):
        return False
    weight: Any = embedding.weight
    spread = SpreadEmbedding(copy.deepcopy(embedding), None, is_first=True)
    with torch.no_grad():
        output = spread.of_looked_up(functional.embedding(tokens, weight))
    return torch.equal(output, lookups[0].output)


def _refusal(reason: str) -> SlipstreamError:
    return SlipstreamError(f"vocabulary='spread': {reason}.")
