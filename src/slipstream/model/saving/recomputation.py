"""Recomputation (rule 4): what a forward keeps, and the replay that restores the rest just before the backward.

GPipe section 2.3 calls it re-materialization. Keys and values stay in the context store, and a replay reads them there,
so recomputing a slice never recomputes the slices before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.model.hooks import current_layer
from slipstream.model.saving.saved_tensors import SavedTensors, SavedTensorSlot
from slipstream.model.storages import storage_id
from slipstream.model.tensor_spec import Tensors


@dataclass(frozen=True)
class RecomputePolicy:
    """The part of a slice's forward that R recomputes; F keeps the rest.

    `full` recomputes all that F does on the stage, head and loss included. A number recomputes that many of the stage's
    first layers and what comes before them; half a layer counts as one. `selective` keeps the outputs of matrix
    products and of attention, and recomputes norms, activations, rotary embeddings, dropout and the loss, which cost
    memory but little time.
    """

    num_layers: int | None = None  # None: all of them
    keeps_products: bool = False

    @classmethod
    def parse(cls, setting: str | int, most_layers: int, besides: str = "") -> RecomputePolicy | None:
        """Returns the policy of a Pipeline's setting; None for "none".

        `most_layers` is the number of layers of the largest stage; `besides` lists further settings that the caller
        accepts.
        """
        if isinstance(setting, int) and not isinstance(setting, bool) and 1 <= setting <= most_layers:
            return cls(num_layers=setting)
        known = {"none": None, "selective": cls(keeps_products=True), "full": cls()}
        if isinstance(setting, str) and setting in known:
            return known[setting]
        raise SlipstreamError(
            f"memory.recompute={setting!r}: give 'none', 'selective', 'full', {besides}or the number of each stage's "
            f"layers to recompute, 1 to {most_layers} here."
        )


class SliceReplay:
    """One slice's forward on one stage that can be repeated: `forward` once, `replay` once before the backward."""

    def __init__(
        self,
        saved: SavedTensors,
        what: RecomputePolicy | None,
        layers: range,
        inputs: Tensors,
        needs_gradient: Sequence[bool],
    ) -> None:
        """`layers` are the stage's, `inputs` the forward's; `what` is None where nothing is recomputed, only moved to
        the host."""
        self.saved = saved
        self._what = what
        self._layers = layers
        self._inputs = [] if what is None else [saved.hold(tensor) for tensor in inputs]
        self._needs_gradient = needs_gradient
        self._products: list[SavedTensorSlot | None] = []  # in order; None: changed in place, so not kept

    @contextmanager
    def forward(self, store: ContextStore) -> Iterator[None]:
        """Surrounds F."""
        with ExitStack() as stack:
            products = None
            if self._what is not None and self._what.keeps_products:
                products = stack.enter_context(_KeepProducts(self.saved))
                stack.enter_context(store.wrapped_attention(products.attention))
            stack.enter_context(self.saved.saving(self._keeps(products)))
            yield
        if products is not None:
            self._products = products.kept

    def replay(self, run: Callable[[Tensors], object], store: ContextStore) -> None:
        """Runs R: `run` is F's own call on the inputs, under F's autocast and modes. Afterwards nothing is missing."""
        pairs = zip(self._inputs, self._needs_gradient, strict=True)
        inputs = tuple(_tensor(held).requires_grad_(needed) for held, needed in pairs)
        with ExitStack() as stack:
            stack.enter_context(store.replay())
            if self._products:
                products = stack.enter_context(_ReplayProducts(self._products))
                stack.enter_context(store.wrapped_attention(products.attention))
            self.saved.refill(partial(run, inputs))
        self._products, self._inputs, self._needs_gradient = [], [], []

    def _keeps(self, products: _KeepProducts | None) -> Callable[[Tensor], bool]:
        if self._what is None:
            return lambda tensor: True
        if products is not None:
            return products.is_kept
        if self._what.num_layers is None:
            return lambda tensor: False
        end = min(self._layers.start + self._what.num_layers, self._layers.stop)
        return lambda tensor: current_layer() >= end


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
)
_Attended = tuple[Tensor, Tensor]  # output and log-sum-exp


class _KeepProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what matrix products and attention return, in order, whatever code calls them."""

    def __init__(self, saved: SavedTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[SavedTensorSlot | None] = []
        self._saved = saved
        self._places: dict[int, int] = {}  # address of the storage -> index in kept
        self._attends = False

    def is_kept(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._places

    def attention(self, compute: Callable[[], _Attended]) -> _Attended:
        """Keeps the result of an attention as one product."""
        self._attends = True
        result = compute()
        for tensor in result:
            self._keep(tensor)
        self._attends = False
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not self._attends:
            if func.overloadpacket in _PRODUCTS:
                self._keep(result)
            elif func._schema.is_mutable:
                self._forget(func, args, kwargs or {})
        return result

    def _keep(self, tensor: Tensor) -> None:
        self._places[storage_id(tensor)] = len(self.kept)
        self.kept.append(self._saved.hold(_alias(tensor)))

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forgets a product that is changed in place afterwards, so that the replay computes it again."""
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
        for argument, value in given:
            if argument.is_write and isinstance(value, Tensor):
                index = self._places.pop(storage_id(value), None)
                if index is not None:
                    self.kept[index] = None


class _ReplayProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns what was kept instead of computing it."""

    def __init__(self, kept: list[SavedTensorSlot | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = iter(kept)
        self._attends = False

    def attention(self, compute: Callable[[], _Attended]) -> _Attended:
        output, logsumexp = next(self._kept), next(self._kept)
        if output is not None and logsumexp is not None:
            return _tensor(output), _tensor(logsumexp)
        self._attends = True
        result = compute()
        self._attends = False
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _PRODUCTS and not self._attends:
            kept = next(self._kept)
            if kept is not None:
                return _tensor(kept)
        return func(*args, **kwargs or {})


def _tensor(kept: SavedTensorSlot) -> Tensor:
    assert kept.tensor is not None, "offloaded and not reloaded"
    return _alias(kept.tensor)


def _alias(tensor: Tensor) -> Tensor:
    """Returns a tensor over the same memory without the autograd graph, which would otherwise keep itself alive."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
