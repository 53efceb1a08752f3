"""BatchNorm in a pipeline: each microbatch is normalised by itself, and moving averages take in the whole mini-batch.

GPipe section 2.2: "the sufficient statistics of inputs during training are computed over each micro-batch and over
replicas if necessary", and "the moving average of the sufficient statistics over the entire mini-batch" is for
evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Gather = Callable[[Tensor], Tensor]  # returns every replica's tensor, in order: (replicas, *shape)


def is_batch_norm(module: nn.Module) -> bool:
    """Returns whether MiniBatchStatistics handles the module."""
    return type(module) in _KINDS


def mixes_batch(module: nn.Module) -> str | None:
    """Returns why a layer can't be in a pipeline because it mixes the rows of a batch; None where it can."""
    name = type(module).__name__
    if isinstance(module, nn.SyncBatchNorm):
        return (
            f"{name} normalises over ranks, here over each microbatch. Use nn.BatchNorm2d: its moving averages are of "
            "the whole mini-batch, with batch_norm_over_replicas=True over all replicas."
        )
    if isinstance(module, _BatchNorm) and not is_batch_norm(module):
        return f"{name} is not one of PyTorch's batch norms. Use nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d."
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return (
            f"{name}(track_running_stats=False) normalises by the batch in evaluation too, which here is cut into "
            "microbatches. Use track_running_stats=True."
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return f"{name}(track_running_stats=True) averages over the batch. Use track_running_stats=False, or BatchNorm."
    return None


class _Statistics(NamedTuple):
    """The statistics of one microbatch, per channel."""

    size: int  # values per channel
    mean: Tensor
    variance: Tensor  # unbiased


class MiniBatchStatistics:
    """The statistics that the batch norms of some layers saw in a step.

    Call `begin`, the forwards of the microbatches in any order, then `update`. Recomputing a microbatch
    records the same again. Outside a step's forwards the modules work as usual.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Makes every nn.BatchNorm1d, 2d and 3d in `modules` report its statistics."""
        found = dict.fromkeys(module for top in modules for module in top.modules() if is_batch_norm(module))
        self._modules = [cast(_BatchNorm, module) for module in found]
        self._seen: dict[nn.Module, dict[int, _Statistics]] = {}
        self._microbatch: int | None = None  # the one whose forward runs
        self._is_noting = True
        for module in self._modules:
            module.forward = partial(self._normalise, module, module.forward)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begins a step, and forgets the statistics of one that failed."""
        self._seen = {module: {} for module in self._modules}

    @contextmanager
    def seeing(self, microbatch: int, again: bool = False) -> Iterator[None]:
        """Surrounds a stage's training forward of this microbatch; `again` if this part of it ran before."""
        self._microbatch, self._is_noting = microbatch, not again
        try:
            yield
        finally:
            self._microbatch = None

    @torch.no_grad()
    def update(self, gather: Gather) -> None:
        """Ends the step: moves every running mean and variance once, by the whole mini-batch.

        Collective over the replicas whose statistics `gather` returns.
        """
        if self._modules:
            _move(self._modules, _combined(gather(_combined(self._noted()))))

    def _normalise(self, module: _BatchNorm, original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Calls F.batch_norm with momentum 1 and separate averages, which are then the microbatch's own statistics."""
        if self._microbatch is None or not module.training:
            return original(x)
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        assert module.running_mean is not None
        mean, variance = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_mean)
        output = functional.batch_norm(x, mean, variance, module.weight, module.bias, True, 1.0, module.eps)
        if self._is_noting:
            seen = _Statistics(x.numel() // x.shape[1], mean, variance)
            self._seen.setdefault(module, {})[self._microbatch] = seen
        return output

    def _noted(self) -> Tensor:
        """Returns (microbatches in order, 3, channels of all modules): counts, means, sums of squared deviations."""
        microbatches = sorted({number for seen in self._seen.values() for number in seen})
        return torch.stack([self._row(number) for number in microbatches or [-1]])

    def _row(self, microbatch: int) -> Tensor:
        """Returns the statistics of all modules in one tensor, as they have few channels each; count 0 where one saw
        nothing."""
        of = [self._seen.get(module, {}).get(microbatch) or _nothing(module) for module in self._modules]
        mean, variance = (torch.cat(tensors).double() for tensors in ([s.mean for s in of], [s.variance for s in of]))
        counts = [torch.full((len(s.mean),), s.size, dtype=torch.float64) for s in of]
        count = torch.cat(counts).to(mean.device)
        return torch.stack([count, mean, variance * (count - 1)])


def _nothing(module: _BatchNorm) -> _Statistics:
    assert module.running_mean is not None
    zeros = torch.zeros_like(module.running_mean)
    return _Statistics(0, zeros, zeros)


def _combined(rows: Tensor) -> Tensor:
    """Combines the statistics of groups of values, (groups, 3, C), by Chan, Golub and LeVeque 1979."""
    counts, means, squares = rows.unbind(1)
    count = _sum(counts)
    mean = _sum(counts * means) / count.clamp(min=1)
    return torch.stack([count, mean, _sum(squares + counts * (means - mean) ** 2)])


def _sum(groups: Tensor) -> Tensor:
    """Adds one group after the other.

    `Tensor.sum` adds in an order that depends on how many channels lie side by side, and so on how layers are cut into
    stages.
    """
    return reduce(torch.add, groups.unbind())


def _move(modules: Sequence[_BatchNorm], rows: Tensor) -> None:
    """Moves the running statistics towards those of the mini-batch, (3, channels of all modules)."""
    sizes = [module.num_features for module in modules]
    for module, (count, mean, squares) in zip(
        modules, (own.unbind() for own in torch.split(rows, sizes, dim=1)), strict=True
    ):
        if not count.any():
            continue  # in evaluation mode
        assert module.running_mean is not None
        assert module.running_var is not None
        assert module.num_batches_tracked is not None
        module.num_batches_tracked += 1
        momentum = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
        for running, new in ((module.running_mean, mean), (module.running_var, squares / (count - 1))):
            running.copy_((1 - momentum) * running.double() + momentum * new)
