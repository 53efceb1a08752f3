"""Token slices of an nn.Sequential: the layer after which tokens are cut, and attention that sees earlier slices."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from slipstream.attention import AttentionSite, KeyRanges, attend
from slipstream.errors import SlipstreamError
from slipstream.model.hooks import current_forward
from slipstream.sequential.batch_norm import is_batch_norm
from slipstream.sequential.layer_list import LayerContext, LayerValue, SequentialLayer, SkipRoute


class CutTokens(nn.Module):
    """Marks where token slices begin: later layers work token by token, or see earlier tokens by `causal_attention`.

        nn.Sequential(*encoder, slipstream.CutTokens(), *decoder)  # Pipeline(..., slices=4)

    It takes and returns a tensor (b, T, ...), of which a pipeline cuts T into slices, or a tuple that begins with one.
    Every slice sees the tuple's other tensors whole, such as the memory of the decoder's cross-attention. Layers before
    it run once for each microbatch, with its first slice. Without slices, and outside a pipeline, it returns its input.
    """

    def forward(self, inputs: LayerValue) -> LayerValue:
        return inputs


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """Returns the attention of every token to itself and all earlier tokens, including those of earlier slices.

    Outside a pipeline, and without slices, it is PyTorch's scaled_dot_product_attention with is_causal. Not collective.

    Args:
        query: (b, heads, T, head width).
        key: (b, heads, T, head width), or with fewer heads, whose number divides the queries'.
        value: (b, key's heads, T, any width).
        scale: the factor of the scores; default: 1 / sqrt(head width).

    Returns:
        (b, heads, T, value's width).

    Raises:
        SlipstreamError: T isn't the slice's number of tokens, or differs between queries and keys.
    """
    context = current_forward()
    tokens = context.tokens if isinstance(context, LayerContext) else None
    length = query.shape[2] if tokens is None else len(tokens)
    if not query.shape[2] == key.shape[2] == length:
        raise SlipstreamError(
            f"causal_attention is given queries {tuple(query.shape)} and keys {tuple(key.shape)}; dim 2 must be the "
            f"{length} tokens. Give (b, heads, T, head width)."
        )
    if tokens is None:
        is_grouped = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
    assert isinstance(context, LayerContext)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    ranges = KeyRanges.causal(tokens.start, tokens.stop)
    return attend(query, key, value, AttentionSite(context.store, context.next_call(), ranges, scale))


def find_cut(layers: Sequence[SequentialLayer]) -> int | None:
    """Returns the number of the layer CutTokens, or None. Raises SlipstreamError where there are two."""
    cuts = [index for index, layer in enumerate(layers) if isinstance(layer.module, CutTokens)]
    if len(cuts) > 1:
        raise SlipstreamError(f"{layers[cuts[1]]}: tokens are cut once, by {layers[cuts[0]]}. Leave one of them out.")
    return cuts[0] if cuts else None


def check_cut(layers: Sequence[SequentialLayer], routes: Sequence[SkipRoute], cut: int) -> None:
    """Raises SlipstreamError for layers and skips that can't be exact in slices, as far as that shows without running
    them."""
    for route in routes:
        if route.stash < cut < route.pop:
            raise SlipstreamError(
                f"{layers[route.pop]}: the skip {route.name!r} begins before {layers[cut]} and ends after it, so "
                "nothing says whether it is cut. Pop it before, and hand the tensor on in the tuple: its first is cut, "
                "the others stay whole."
            )
    for layer in layers[cut:]:
        if any(is_batch_norm(module) for module in layer.module.modules()):
            raise SlipstreamError(
                f"{layer}: a batch norm after {layers[cut]} would normalise every token slice by itself. Leave slices "
                "out, or use a norm that looks at one token, such as LayerNorm."
            )
