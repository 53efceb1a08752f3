"""A forward's tensors for its backward: kept, recomputed (rule 4), or moved to the host.

Recomputation (rule 4): a forward keeps a part, and the rest is restored within the backward, one layer after the other
(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"), or by a replay of the whole stage before it, which
GPipe section 2.3 calls re-materialization. Keys and values stay in the context store, and are read there, so
recomputing a slice never recomputes the slices before it; where there are none, a layer writes them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.host_memory import HostMemory, HostTensors, Tenant, host_memory
from slipstream.keyed_draws import current_draws, drawing
from slipstream.model.hooks.token_slice import noting_outputs
from slipstream.model.tensors import Tensors, storage_bytes, storage_id, written_tensors

_autograd: Any = torch._C._autograd
_modes: Any = torch.overrides


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Lets autograd keep tensors saved from here on: for code that differentiates in its forward, which needs it there,
    and by torch.func, which refuses hooks."""
    hooks: list[Any] = []
    while top := _autograd._top_saved_tensors_default_hooks(False):
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


_MISSING = "a backward runs before what its forward dropped is recomputed and reloaded"


class RecomputationError(RuntimeError):
    """Raised where a forward did not repeat itself or a tensor is missing: a mistake of model or schedule."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class SavedTensorSlot:
    """Represents one saved tensor in the autograd graph, until the node that saved it is freed."""

    # None once dropped or moved to the host. It has no grad_fn, which would keep the graph alive.
    tensor: Tensor | None
    shape: torch.Size


@dataclass
class _MovedTensor:
    """The place of a tensor in its storage, while the storage is on the host."""

    slot: SavedTensorSlot
    block: int
    dtype: torch.dtype
    layout: tuple[int, torch.Size, tuple[int, ...]]  # offset, size and stride


class SavedTensors:
    """The saved tensors of one slice on one stage, from its forward to its backward.

    The graph holds the slots, so that a backward frees memory node by node as it does without this class. A repeated
    forward saves the same tensors in the same order, which is how a dropped one finds its slot again:

        forward   x  y  z  w     the graph keeps x and w, drops y and z
        replay    x' y' z'       y' and z' fill the slots; after the last dropped one the replay ends

    Args:
        shared: identities of storages that others keep anyway (parameters, the batch): never moved, not counted.
    """

    def __init__(self, shared: set[int]) -> None:
        self._shared = shared
        self._slots: list[weakref.ref[SavedTensorSlot]] = []
        self._held: list[weakref.ref[SavedTensorSlot]] = []
        self._moved: list[_MovedTensor] = []
        self.is_refilled = False

    def saving(
        self, keeps: Callable[[Tensor], bool], recompute: Callable[[], None] | None = None
    ) -> AbstractContextManager[object]:
        """Returns a context for the forward that keeps those saved tensors for which `keeps` is true, and drops the
        others.

        A backward that needs a dropped one calls `recompute`, if that is given, which must `refill` them all.
        """

        def pack(tensor: Tensor) -> SavedTensorSlot:
            slot = SavedTensorSlot(tensor.detach() if keeps(tensor) else None, tensor.shape)
            self._slots.append(weakref.ref(slot))
            return slot

        def unpack(slot: SavedTensorSlot) -> Tensor:
            if slot.tensor is None and recompute is not None:
                recompute()
            return _unpack(slot)

        return saved_tensors_hooks(pack, unpack)

    def hold(self, tensor: Tensor) -> SavedTensorSlot:
        """Returns a slot for a tensor that the caller needs for the replay: moved and counted like the graph's."""
        slot = SavedTensorSlot(tensor, tensor.shape)
        self._held.append(weakref.ref(slot))
        return slot

    def refill(self, run: Callable[[], object], at_once: bool = True) -> None:
        """Repeats the forward by calling `run`, until every slot that was dropped is filled: then `is_refilled`, and
        `run` ends `at_once` or by itself, by ReplayFinished or not.

        Raises RecomputationError where it saves different tensors from the first time.
        """
        slots = [reference() for reference in self._slots]
        dropped = {i: slot for i, slot in enumerate(slots) if slot is not None and slot.tensor is None}
        last = max(dropped, default=-1)
        count = 0
        self.is_refilled = False

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if count in dropped:
                _fill(dropped[count], tensor)
            count += 1
            if count > last:
                self.is_refilled = True
                if at_once:
                    raise ReplayFinished

        if dropped:
            try:
                with saved_tensors_hooks(pack, _unpack):
                    run()
            except ReplayFinished:
                return
            if not self.is_refilled:
                raise RecomputationError(f"a forward saved {last + 1} tensors or more, its recomputation {count}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages that are kept here and nowhere else."""
        return storage_bytes((tensor for _, tensor in self._filled()), self._shared)

    def take_out(self) -> list[Tensor]:
        """Releases all tensors that aren't shared. Returns their storages, each once, as tensors of bytes."""
        blocks: list[Tensor] = []
        numbers: dict[int, int] = {}  # storage -> index in blocks
        for slot, tensor in self._filled():
            identity = storage_id(tensor)
            if identity in self._shared:
                continue
            if identity not in numbers:
                numbers[identity] = len(blocks)
                storage = tensor.untyped_storage()
                blocks.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            layout = int(tensor.storage_offset()), tensor.shape, tensor.stride()
            self._moved.append(_MovedTensor(slot, numbers[identity], tensor.dtype, layout))
            slot.tensor = None
        return blocks

    def put_back(self, blocks: list[Tensor]) -> None:
        """Undoes `take_out`, given the same bytes in other storages, or in parts of one."""
        for moved in self._moved:
            block = blocks[moved.block]
            offset, *form = moved.layout
            tensor = torch.empty(0, dtype=moved.dtype, device=block.device)
            first = int(block.storage_offset()) // moved.dtype.itemsize
            moved.slot.tensor = tensor.set_(block.untyped_storage(), first + offset, *form)
        self._moved.clear()

    def _filled(self) -> Iterator[tuple[SavedTensorSlot, Tensor]]:
        slots = (reference() for reference in (*self._slots, *self._held))
        return ((slot, slot.tensor) for slot in slots if slot is not None and slot.tensor is not None)


class ReplayFinished(Exception):  # noqa: N818  not an error: the replay has done its work
    """Ends a replay."""


def _fill(slot: SavedTensorSlot, tensor: Tensor) -> None:
    if tensor.shape != slot.shape:
        raise RecomputationError(f"a forward saved {tuple(slot.shape)}, its recomputation {tuple(tensor.shape)}")
    slot.tensor = tensor.detach()


def _unpack(slot: SavedTensorSlot) -> Tensor:
    if slot.tensor is None:
        raise RecomputationError(_MISSING)
    return slot.tensor


@dataclass(frozen=True)
class RecomputePolicy:
    """The part of a slice's forward that is computed again for its backward.

    `full` keeps the inputs of each layer, and recomputes one layer at a time within the backward; a number does so with
    that many of the stage's first layers, where half a layer counts as one. `stage` recomputes all that F does on the
    stage, head and loss included, by an R before the backward; `stage+full` does both, so that R brings back only the
    layers' inputs. `selective` keeps the outputs of matrix products and of attention, and its R recomputes norms,
    activations, rotary embeddings, dropout and the loss, which cost memory but little time.
    """

    num_layers: float = 0  # number of first layers of each stage that are recomputed one by one
    by_stage: bool = False
    keeps_products: bool = False
    is_checked: bool = True  # comparison of recomputed outputs with the first ones

    @property
    def has_actions(self) -> bool:
        """Whether slices have an R."""
        return self.by_stage or self.keeps_products

    @property
    def repeats_graph(self) -> bool:
        """Whether R makes the graph of the backward anew, and F's is dropped; else R fills what F's lacks."""
        return not self.keeps_products

    @property
    def setting(self) -> str | int:
        """The setting that `parse` takes."""
        if self.keeps_products:
            return "selective"
        if self.num_layers < inf:
            return int(self.num_layers) or "stage"
        return "stage+full" if self.by_stage else "full"

    @classmethod
    def parse(
        cls, setting: str | int, most_layers: int, besides: str = "", *, is_checked: bool = True
    ) -> RecomputePolicy | None:
        """Returns the policy of a Pipeline's setting; None for "none".

        `most_layers` is the number of layers of the largest stage; `besides` lists further settings that the caller
        accepts.
        """
        if isinstance(setting, int) and not isinstance(setting, bool) and 1 <= setting <= most_layers:
            return cls(num_layers=setting, is_checked=is_checked)
        known = {
            "selective": cls(keeps_products=True, is_checked=is_checked),
            "full": cls(num_layers=inf, is_checked=is_checked),
            "stage": cls(by_stage=True, is_checked=is_checked),
            "stage+full": cls(num_layers=inf, by_stage=True, is_checked=is_checked),
        }
        if setting == "none":
            return None
        if isinstance(setting, str) and setting in known:
            return known[setting]
        raise SlipstreamError(
            f"memory.recompute={setting!r}: give 'none', 'selective', 'full', 'stage', 'stage+full', {besides}or the "
            f"number of each stage's layers to recompute, 1 to {most_layers} here."
        )


def recompute_advice(setting: str | int, waits: bool = True) -> str:
    """Returns the setting of `memory.recompute` that keeps less than the one that is given, and ", "; nothing where
    none does. `waits` is whether slices wait between forward and backward, which a stage can recompute then."""
    if setting == "stage+full" or (setting == "full" and not waits):
        return ""
    return "memory.recompute='stage+full', " if setting in ("full", "stage") and waits else "memory.recompute='full', "


@dataclass(eq=False)
class SliceReplay:
    """A repeatable forward of one slice on one stage: `forward` once, then `replay` once before the backward."""

    saved: SavedTensors
    what: RecomputePolicy | None  # None: no recomputation in R, only a move to the host
    inputs: InitVar[Tensors]  # the forward's inputs

    def __post_init__(self, inputs: Tensors) -> None:
        self._inputs = [] if self.what is None else [self.saved.hold(tensor) for tensor in inputs]
        self._products: list[SavedTensorSlot | None] = []  # products in order; None: changed in place, so not kept
        self._checks = OutputChecks() if self.what is not None and self.what.is_checked else None

    @contextmanager
    def forward(self, store: ContextStore) -> Iterator[None]:
        """Surrounds F."""
        with self._checks.keeping() if self._checks else nullcontext():
            if self.what is None:
                with self.saved.saving(lambda _: True):
                    yield
                return
            if self.what.repeats_graph:
                with store.repeated(), saved_tensors_hooks(_nothing_of, _never_saved):
                    yield
                return
            products = _KeepProducts(self.saved)
            with products, store.wrapped_attention(products.attention), self.saved.saving(products.is_kept):
                yield
            self._products = products.kept

    def replay(self, run: Callable[[Tensors], Tensors], store: ContextStore) -> Tensors | None:
        """Runs R: `run` is F's own call on the inputs, under F's autocast and modes. Afterwards nothing is missing.

        Returns the outputs of `run`, whose graph is that of the backward; None where F's is, and is filled now.
        """
        assert self.what is not None
        inputs = tuple(_tensor(held) for held in self._inputs)
        outputs: Tensors | None = None
        with ExitStack() as stack:
            stack.enter_context(store.replay(self.what.repeats_graph))
            if self.what.repeats_graph:
                if self._checks is not None:
                    stack.enter_context(self._checks.comparing(self.saved))
                outputs = run(inputs)
            else:
                products = stack.enter_context(_ReplayProducts(self._products))
                stack.enter_context(store.wrapped_attention(products.attention))
                replay_checked(self.saved, partial(run, inputs), self._checks)
        self._products, self._inputs = [], []
        return outputs


def _nothing_of(_: Tensor) -> None:
    """Stands for what a dropped graph saves."""


def _never_saved(_: None) -> Tensor:
    raise RecomputationError(_MISSING)


class OutputChecks:
    """Compares the outputs of one slice's layers when they are computed again with their first ones.

    It keeps two sums of the bits of every output, which cost a pass over it each: a forward that draws other random
    numbers, or reads a tensor it has changed, gives other bits.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[str, list[Tensor]]] = []  # each layer's outputs, in order
        self._place = 0
        self._saved: SavedTensors | None = None  # tensors to refill; None: a forward whose outputs are kept

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Surrounds the forward."""
        with noting_outputs(self.note):
            yield

    @contextmanager
    def comparing(self, saved: SavedTensors) -> Iterator[None]:
        """Surrounds the recomputation, which ends after the layer that has refilled `saved`."""
        self._saved = saved
        self._place = 0
        with noting_outputs(self.note):
            yield
        self._kept = []

    def note(self, layer: str, output: object) -> None:
        """Takes a layer's output. Where a CUDA graph is recorded, which would repeat the comparison, it compares
        nothing."""
        is_recorded = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._saved is None:
            if not is_recorded:
                self._kept.append((layer, _sums_of_bits(output)))
            return
        if self._place < len(self._kept):
            name, sums = self._kept[self._place]
            again = _sums_of_bits(output)
            if name != layer or len(sums) != len(again):
                _differing.append((layer, True))
            elif sums:
                _differing.append((layer, torch.ne(torch.stack(sums), torch.stack(again)).any()))
        self._place += 1
        if self._saved.is_refilled:
            raise ReplayFinished


_Outputs = TypeVar("_Outputs")


def recompute_in_backward(
    run: Callable[[], _Outputs],
    again: Callable[[Any], object],
    inputs: Any,
    is_checked: bool,
    is_repeated: bool,
    on_host: MovedInputs | None = None,
) -> _Outputs:
    """Returns `run()`, keeping only its inputs, tensors in containers of any kind; `again(inputs)` computes the rest
    once more in the backward, and layers' outputs are compared where that `is_checked`. Nothing is kept where all of it
    `is_repeated` before the backward. Inputs with a gradient are kept `on_host`, if that is given.

    The backward uses the same autocast, and draws as the forward does; `again` is responsible for its random state.
    Code around the call, as of a slice with an R or OFFLOAD, has the inputs among its saved tensors.
    """
    if is_repeated:
        with noting_outputs(None):
            return run()
    leaves, form = tree_flatten(inputs)
    saved = SavedTensors(set())
    kept = [_kept(leaf, on_host) for leaf in leaves]
    checks = OutputChecks() if is_checked else None
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
    autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    draws = current_draws()
    modes = [weakref.ref(mode) for mode in _modes._get_current_function_mode_stack()]

    def refill() -> None:
        arguments = tree_unflatten([leaf.tensor() for leaf in kept], form)
        kept.clear()
        with torch.enable_grad(), torch.autocast(*autocast), drawing(draws), _within(modes):
            replay_checked(saved, lambda: again(arguments), checks)

    with checks.keeping() if checks else noting_outputs(None), saved.saving(lambda tensor: False, refill):
        return run()


@contextmanager
def _within(modes: Sequence[weakref.ref[TorchFunctionMode]]) -> Iterator[None]:
    """Surrounds code by the modes of these that are still there, as one that sets a default device: PyTorch leaves a
    backward without them."""
    present = _modes._get_current_function_mode_stack()
    missing = [mode for reference in modes if (mode := reference()) is not None and mode not in present]
    for mode in missing:
        _modes._push_mode(mode)
    try:
        yield
    finally:
        for _ in missing:
            _modes._pop_mode()


def activations_on_host(device: torch.device) -> HostMemory:
    """Returns the host's memory for what forwards on a device keep for their backwards."""
    return host_memory(device, Tenant("memory.offload", "saved activations", "lower memory.offload"))


class MovedInputs:
    """Keeps on the host what enters the layers of a forward, one layer after the other.

    forward    layer 0 | layer 1 | layer 2      what has entered a layer leaves while the layer runs
    backward   layer 2 | layer 1 | layer 0      what enters the layer before is on its way meanwhile
    """

    def __init__(self, device: torch.device, num_layers: int) -> None:
        self.num_layers = num_layers
        self._host = activations_on_host(device)
        self._last: weakref.ref[HostTensors] | None = None
        self._before: weakref.WeakKeyDictionary[HostTensors, weakref.ref[HostTensors] | None] = (
            weakref.WeakKeyDictionary()
        )

    def keep(self, tensor: Tensor) -> HostTensors:
        """Begins to move what enters the next layer."""
        moved = self._host.keep([tensor])
        moved.leave()
        self._before[moved] = self._last
        self._last = weakref.ref(moved)
        return moved

    def fetch(self, moved: HostTensors) -> Tensor:
        """Returns what entered a layer, and begins to bring what entered the one before."""
        moved.begin()
        (tensor,) = moved.wait()
        before = self._before.pop(moved, None)
        if before is not None and (earlier := before()) is not None:
            earlier.begin()
        return tensor


class _Kept(NamedTuple):
    """An input of a recomputation, as kept by the hooks on saved tensors."""

    value: Any
    unpack: Callable[[Any], Any] = lambda value: value
    needs_gradient: bool | None = None  # None for anything but a tensor

    def tensor(self) -> Any:
        value = self.unpack(self.value)
        return value if self.needs_gradient is None else value.detach().requires_grad_(self.needs_gradient)


def _kept(leaf: Any, on_host: MovedInputs | None) -> _Kept:
    if not isinstance(leaf, Tensor):
        return _Kept(leaf)
    if (hooks := _autograd._top_saved_tensors_default_hooks(False)) is None:
        if on_host is not None and leaf.requires_grad:
            return _Kept(on_host.keep(leaf.detach()), on_host.fetch, needs_gradient=True)
        return _Kept(leaf.detach(), needs_gradient=leaf.requires_grad)
    pack, unpack = hooks
    return _Kept(pack(leaf.detach()), unpack, leaf.requires_grad)


_differing: list[tuple[str, Tensor | bool]] = []  # (recomputed layer, True if its output differs)


def replay_checked(saved: SavedTensors, run: Callable[[], object], checks: OutputChecks | None) -> None:
    """Refills `saved` by calling `run`, whose outputs are compared, if `checks` has the first ones."""
    with checks.comparing(saved) if checks else nullcontext():
        saved.refill(run, at_once=checks is None)


def take_differing_layers() -> list[str]:
    """Returns the layers that gave other outputs when they were computed again since the last call."""
    differing = [layer for layer, differs in _differing if differs is True]
    flags = [(layer, differs) for layer, differs in _differing if isinstance(differs, Tensor)]
    if flags:
        # One transfer for all flags, as the host waits for the GPU each time.
        together = torch.stack([differs for _, differs in flags]).tolist()
        differing += [layer for (layer, _), differs in zip(flags, together, strict=True) if differs]
    _differing.clear()
    return [*dict.fromkeys(differing)]


def _sums_of_bits(output: object) -> list[Tensor]:
    """Returns two sums of each tensor's bits, in which its rows and its columns count differently, so that they tell
    numbers that change places."""
    tensors = [tensor.detach() for tensor in tree_iter(output) if isinstance(tensor, Tensor) and tensor.numel()]
    return [torch.stack([_weighted(words.sum(0)), _weighted(words.sum(1))]) for words in map(_words, tensors)]


def _weighted(sums: Tensor) -> Tensor:
    # Times odd numbers that differ, modulo 2^64.
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor as whole numbers, as wide as rows allow: (rows, words)."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    size = rows.element_size()
    fits = not (rows.shape[1] * size) % 8 and not (rows.storage_offset() * size) % 8 and rows.stride(1) == 1
    return rows.view(torch.int64 if fits and not (rows.stride(0) * size) % 8 else _WORDS[size])


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
)
_Attended = tuple[Tensor, Tensor]  # output and log-sum-exp


class _KeepProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the outputs of matrix products and attention, in order, whatever code calls them."""

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
        for value in written_tensors(func, args, kwargs):
            index = self._places.pop(storage_id(value), None)
            if index is not None:
                self.kept[index] = None


class _ReplayProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns the kept outputs instead of computing them."""

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
        if is_product and (output := next(self._kept)) is not None:
            return _tensor(output)
        return func(*args, **kwargs or {})


def _tensor(kept: SavedTensorSlot) -> Tensor:
    assert kept.tensor is not None, "offloaded and not reloaded"
    return _alias(kept.tensor)


def _alias(tensor: Tensor) -> Tensor:
    """Returns a tensor over the same memory without the autograd graph, which would otherwise keep itself alive."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
