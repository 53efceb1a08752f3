"""Continues Mamba 1's selective scan, which begins at zero in all kernels and in transformers' own code.

With a diagonal A the recurrence of Gu & Dao 2023 (Mamba, equations 2a and 2b, discretised as in algorithm 2),

    h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t        y_t = C_t h_t

is linear in its state, so what an initial state h_0 adds is known without another scan:

    y_t += C_t exp((Δ_1 + ... + Δ_t) A) h_0
    h_T = exp((Δ_1 + ... + Δ_T) A) h_0 + sum of exp((Δ_{t+1} + ... + Δ_T) A) Δ_t B_t x_t over t

The last state is computed like this too, as the kernels for GPUs have no gradient of theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from itertools import repeat
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import Cache

_SCAN = "mamba_selective_scan"  # in the files of Mamba, Falcon-Mamba, Jamba and Zamba
_Scan = Callable[..., Any]


def continue_from_state(module: nn.Module) -> None:
    """Makes a mixer that calls the scan begin with the state in its cache."""
    if hasattr(sys.modules[type(module).__module__], _SCAN) and hasattr(module, "A_log"):
        scanning = partial(_scan_from_cache, module, module.forward)
        # under its own signature, which says that it is given the cache
        module.forward = update_wrapper(scanning, module.forward)


def _scan_from_cache(mixer: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    cache = kwargs.get("cache_params")
    if cache is None:
        return forward(*args, **kwargs)  # a whole sequence
    file, states = sys.modules[type(mixer).__module__], _states_of_scans(cache.get_recurrent_state(mixer.layer_idx))
    own: _Scan = getattr(file, _SCAN)

    def scan(*inputs: Any, return_last_state: bool, **settings: Any) -> tuple[Tensor, Tensor]:
        return scan_from(next(states), own, *inputs, **settings)

    with patch.object(file, _SCAN, scan):
        return forward(*args, **kwargs | {"cache_params": _ForScans(cache)})


class _ForScans:
    """A cache that keeps its recurrent states to itself, so that a token alone is scanned as well."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _states_of_scans(state: Tensor | None) -> Iterator[Tensor | None]:
    """Yields the state (b, d, n) of each scan of a mixer: Zamba's has one for each of its heads, (b, heads, d, n)."""
    if state is None:
        return repeat(None)
    return iter([state] if state.dim() == 3 else state.unbind(1))


def scan_from(
    initial: Tensor | None,  # (b, d, n)
    own: _Scan,
    x: Tensor,  # (b, d, T)
    dt: Tensor,  # (b, d, T)
    A: Tensor,  # (d, n)
    B: Tensor,  # (b, n, T)
    C: Tensor,  # (b, n, T)
    *,
    z: Tensor,  # (b, d, T), of the gate
    delta_bias: Tensor | None,
    delta_softplus: bool,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Returns a scan's output (b, d, T) and last state (b, d, n), given the state before it."""
    biases = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
    output: Tensor = own(x, dt, A, B, C, z=z, return_last_state=False, **biases, **settings)
    biased = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    delta = (softplus(biased) if delta_softplus else biased).float()
    after = delta.flip(-1).cumsum(-1).flip(-1) - delta  # from the end, where it counts, so that small sums are exact
    last = torch.einsum("bdtn,bdt,bnt->bdn", _decay(A, after), delta * x.float(), B.float())
    if initial is None:
        return output, last
    decay = _decay(A, delta.cumsum(-1))
    added = torch.einsum("bdtn,bdn,bnt->bdt", decay, initial, C.to(initial.dtype))
    return output + (added * silu(z)).to(output.dtype), last + decay[:, :, -1] * initial


def _decay(A: Tensor, delta: Tensor) -> Tensor:
    """Returns exp(ΔA), (b, d, T, n)."""
    return torch.exp(delta[..., None] * A[None, :, None])
