"""BatchNorm in a pipeline: each microbatch is normalised by itself, and moving averages take in the whole mini-batch.

GPipe section 2.2: "the sufficient statistics of inputs during training are computed over each micro-batch and over
replicas if necessary", and "the moving average of the sufficient statistics over the entire mini-batch" is for
evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_batch_norm = functional.batch_norm
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


class MiniBatchStatistics:
    """The statistics that the batch norms of some layers saw in a step.

    Call `begin`, the forwards of the microbatches in any order, then `update`. Recomputing a microbatch records the
    same again. Outside a step's forwards the modules work as usual. In them too they run their own code, but with the
    moving averages that it passes to F.batch_norm replaced.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Makes every nn.BatchNorm1d, 2d and 3d in `modules` report its statistics."""
        norms = dict.fromkeys(module for top in modules for module in top.modules() if is_batch_norm(module))
        self._modules = [cast(_BatchNorm, module) for module in norms]
        # by microbatch and module, (3, channels): counts, means, sums of squared deviations
        self._seen: dict[int, dict[nn.Module, Tensor]] = {}
        self._nothing: dict[nn.Module, Tensor] = {
            module: torch.zeros_like(module.get_buffer("running_mean"), dtype=torch.float64).expand(3, -1)
            for module in self._modules
        }
        self._microbatch: int | None = None  # the microbatch whose forward runs
        self._is_noting = True
        self.num_calls: Counter[nn.Module] = Counter()  # noted since the step began
        for module in self._modules:
            module.forward = partial(self._run, module, module.forward)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begins a step, and forgets the statistics of one that failed."""
        self._seen = {}
        self.num_calls.clear()

    @contextmanager
    def seeing(self, microbatch: int, again: bool = False) -> Iterator[None]:
        """Surrounds a stage's training forward of this microbatch; `again` if this part of it ran before."""
        self._microbatch = microbatch
        self._is_noting = not again
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
            rows = [self._row(microbatch) for microbatch in sorted(self._seen) or [-1]]
            _move(self._modules, _combined(gather(_combined(torch.stack(rows)))))

    def _run(self, module: _BatchNorm, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Calls the module's forward, which neither counts the microbatch nor changes its moving averages."""
        if self._microbatch is None or not module.training:
            return original(*args, **kwargs)
        count = module._buffers["num_batches_tracked"]
        module._buffers["num_batches_tracked"] = None
        functional.batch_norm = partial(self._normalise, module)
        try:
            return original(*args, **kwargs)
        finally:
            module._buffers["num_batches_tracked"] = count
            functional.batch_norm = _batch_norm

    def _normalise(
        self,
        module: _BatchNorm,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Calls F.batch_norm with momentum 1 and separate averages, which are then the microbatch's own statistics."""
        if not training or running_mean is not module._buffers["running_mean"]:
            return _batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        mean, variance = (torch.zeros_like(module.get_buffer("running_mean")) for _ in range(2))
        output = _batch_norm(x, mean, variance, weight, bias, True, 1.0, eps)
        if self._is_noting and self._microbatch is not None:
            count = torch.full_like(mean, x.numel() // x.shape[1], dtype=torch.float64)
            moments = torch.stack([count, mean.double(), variance.double() * (count - 1)])
            self._seen.setdefault(self._microbatch, {})[module] = moments
            self.num_calls[module] += 1
        return output

    def _row(self, microbatch: int) -> Tensor:
        # All modules' in one tensor, as they have few channels each; a module that saw nothing has count 0.
        return torch.cat([*(self._nothing | self._seen.get(microbatch, {})).values()], dim=1)


def _combined(rows: Tensor) -> Tensor:
    """Combines the statistics of groups of values, (groups, 3, C), by Chan, Golub and LeVeque 1979."""
    counts, means, squares = rows.unbind(1)
    count = _sum(counts)
    mean = _sum(counts * means) / count.clamp(min=1)
    return torch.stack([count, mean, _sum(squares + counts * (means - mean) ** 2)])


def _sum(groups: Tensor) -> Tensor:
    # One group after the other: `Tensor.sum` adds in an order that depends on how many channels lie side by side, and
    # so on how layers are cut into stages.
    return reduce(torch.add, groups.unbind())


def _move(modules: Sequence[_BatchNorm], rows: Tensor) -> None:
    """Moves the running statistics towards those of the mini-batch, (3, channels of all modules)."""
    parts = torch.split(rows, [module.num_features for module in modules], dim=1)
    for module, (count, mean, squares) in zip(modules, parts, strict=True):
        if not count.any():
            # The module was in evaluation mode.
            continue
        num_batches = module.get_buffer("num_batches_tracked").add_(1)
        momentum = 1 / float(num_batches) if module.momentum is None else module.momentum
        for name, new in (("running_mean", mean), ("running_var", squares / (count - 1))):
            running = module.get_buffer(name)
            running.copy_((1 - momentum) * running.double() + momentum * new)
