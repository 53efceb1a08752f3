"""Attention in slices against unsliced attention: one sequence, forward and backward, one thread.

python -m benchmarks.attention                     # prints a table, writes results/attention.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from benchmarks.harness import interleaved, medians, restart_in_environment, setting, write
from slipstream.attention import AttentionSite, ContextStore, KeyRanges, attend
from slipstream.schedule import slice_lengths

CASES = [  # heads, key heads, dtype, layout in memory: models give (batch, tokens, heads, width) transposed
    (8, 8, "float32", "BTHD"),
    (8, 2, "float32", "BTHD"),
    (8, 8, "float32", "BHTD"),
    (8, 2, "float32", "BHTD"),
    (8, 8, "bfloat16", "BTHD"),
    (8, 2, "bfloat16", "BTHD"),
]


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """Returns a new (B,H,T,D) tensor that lies in memory as `layout` says."""
    return tensor.clone(memory_format=torch.contiguous_format) if layout == "BHTD" else _transposed(tensor)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def unsliced(inputs: list[Tensor], grad: Tensor) -> Callable[[], float]:
    """Runs PyTorch's causal attention over the whole sequence."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in inputs)
    grouped = query.shape[1] != key.shape[1]

    def run() -> float:
        began = time.perf_counter()
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        torch.autograd.grad(output, (query, key, value), grad)
        return time.perf_counter() - began

    return run


def sliced(inputs: list[Tensor], grad: Tensor, num_slices: int, layout: str) -> Callable[[], float]:
    """Runs the same in slices, backward in reverse."""
    length, scale = grad.shape[2], inputs[0].shape[-1] ** -0.5
    bounds = list(pairwise(accumulate(slice_lengths(num_slices, length), initial=0)))
    ranges = [KeyRanges.causal(a, b) for a, b in bounds]
    slices = [[in_layout(tensor[:, :, a:b], layout).requires_grad_() for tensor in inputs] for a, b in bounds]
    grads = [in_layout(grad[:, :, a:b], layout) for a, b in bounds]

    def run() -> float:
        began = time.perf_counter()
        store = ContextStore(length)
        outputs = [
            attend(query, key, value, AttentionSite(store, 0, each, scale))
            for (query, key, value), each in zip(slices, ranges, strict=True)
        ]
        for index in reversed(range(num_slices)):
            torch.autograd.grad(outputs[index], slices[index], grads[index])
        return time.perf_counter() - began

    return run


def measure(
    heads: int, key_heads: int, dtype: str, layout: str, length: int, num_slices: int, repeats: int
) -> dict[str, object]:
    torch.manual_seed(0)

    def draw(num_heads: int) -> Tensor:
        return in_layout(torch.randn(1, num_heads, length, 64, dtype=getattr(torch, dtype)), layout)

    inputs, grad = [draw(heads), draw(key_heads), draw(key_heads)], draw(heads)
    contenders = {"unsliced": unsliced(inputs, grad), "sliced": sliced(inputs, grad, num_slices, layout)}
    seconds = medians(interleaved(contenders, repeats))
    return {
        "heads": heads,
        "key_heads": key_heads,
        "dtype": dtype,
        "layout": layout,
        "tokens": length,
        "slices": num_slices,
        "milliseconds": {name: round(1e3 * value, 1) for name, value in seconds.items()},
        "sliced over unsliced": round(seconds["sliced"] / seconds["unsliced"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens")
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    restart_in_environment()
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        rows.append(measure(*case, options.length, options.slices, options.repeats))
        print(rows[-1], flush=True)
    print(f"wrote {write('attention', {'setting': setting(repeats=options.repeats, head_width=64), 'rows': rows})}")


if __name__ == "__main__":
    main()
