"""Recomputation (rule 4): what a forward keeps, and the replay that restores the rest just before the backward.

GPipe section 2.3 calls it re-materialization. Keys and values stay in the context store, and a replay reads them there,
so recomputing a slice never recomputes the slices before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.model.hooks.token_slice import current_layer
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

    @property
    def setting(self) -> str | int:
        """The setting that `parse` takes."""
        return "selective" if self.keeps_products else self.num_layers or "full"

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


@dataclass(eq=False)
class SliceReplay:
    """One slice's forward on one stage that can be repeated: `forward` once, `replay` once before the backward."""

    saved: SavedTensors
    what: RecomputePolicy | None  # None: nothing is recomputed, only moved to the host
    layers: range  # the stage's
    inputs: InitVar[Tensors]  # the forward's
    needs_gradient: Sequence[bool]

    def __post_init__(self, inputs: Tensors) -> None:
        self._inputs = [] if self.what is None else [self.saved.hold(tensor) for tensor in inputs]
        self._products: list[SavedTensorSlot | None] = []  # in order; None: changed in place, so not kept

    @contextmanager
    def forward(self, store: ContextStore) -> Iterator[None]:
        """Surrounds F."""
        if self.what is None or not self.what.keeps_products:
            with self.saved.saving(self._keeps):
                yield
            return
        products = _KeepProducts(self.saved)
        with products, store.wrapped_attention(products.attention), self.saved.saving(products.is_kept):
            yield
        self._products = products.kept

    def replay(self, run: Callable[[Tensors], object], store: ContextStore) -> None:
        """Runs R: `run` is F's own call on the inputs, under F's autocast and modes. Afterwards nothing is missing."""
        pairs = zip(self._inputs, self.needs_gradient, strict=True)
        inputs = tuple(_tensor(held).requires_grad_(needed) for held, needed in pairs)
        with ExitStack() as stack:
            stack.enter_context(store.replay())
            if self._products:
                products = stack.enter_context(_ReplayProducts(self._products))
                stack.enter_context(store.wrapped_attention(products.attention))
            self.saved.refill(partial(run, inputs))
        self._products, self._inputs, self.needs_gradient = [], [], []

    def _keeps(self, _: Tensor) -> bool:
        """Returns whether F keeps what is saved now: all of it, nothing, or what the stage's last layers save."""
        if self.what is None or self.what.num_layers is None:
            return self.what is None
        return current_layer() >= min(self.layers.start + self.what.num_layers, self.layers.stop)


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
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        for value in (given.get(argument.name) for argument in arguments if argument.is_write):
            index = self._places.pop(storage_id(value), None) if isinstance(value, Tensor) else None
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
        is_product = func.overloadpacket in _PRODUCTS and not self._attends
        if is_product and (kept := next(self._kept)) is not None:
            return _tensor(kept)
        return func(*args, **kwargs or {})


def _tensor(kept: SavedTensorSlot) -> Tensor:
    assert kept.tensor is not None, "offloaded and not reloaded"
    return _alias(kept.tensor)


def _alias(tensor: Tensor) -> Tensor:
    """Returns a tensor over the same memory without the autograd graph, which would otherwise keep itself alive."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
