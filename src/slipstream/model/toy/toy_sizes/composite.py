"""Makes the parts of a composite configuration small that are no language model: towers for images and sounds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from transformers import PretrainedConfig

from slipstream.model.toy.toy_sizes.layers import shrink_layers, take_layer_overrides
from slipstream.model.toy.toy_sizes.widths import WIDTHS, first_of, layer_parts, shrink_widths

_LINKED = re.compile(r"hidden_size|_dim$|width|output_size|out_size")  # sizes that may be another part's width


def width_of(config: PretrainedConfig) -> int | None:
    """Returns the width of what goes from layer to layer; None where the configuration has none by a known name."""
    name = first_of(config, WIDTHS)
    return None if name is None else getattr(config, name)


def shrink_other_parts(whole: PretrainedConfig, text: PretrainedConfig, text_width: int | None) -> None:
    """Makes every other configuration in `whole` small, and what must be as wide as something that was made so.

    `text_width` is that of `text` before it was made small.
    """
    done = [text, *layer_parts(text)]
    parts = [part for part in _parts(whole) if not any(part is each for each in done)]
    small = {text_width: width_of(text)}
    own: dict[int, dict[int | None, int | None]] = {}  # by part
    for part in parts:
        overrides = take_layer_overrides(part)
        before = width_of(part)
        shrink_widths(part, overrides)
        if overrides := shrink_layers(part, overrides):
            part.per_layer_config = overrides
        own[id(part)] = {before: width_of(part)}
        small = own[id(part)] | small
    for part in [whole, *parts] if parts else []:
        widths = small | own.get(id(part), {})
        for name, value in vars(part).items():
            if isinstance(value, int) and value in widths and _LINKED.search(name) and "head" not in name:
                setattr(part, name, widths[value])


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield value
            yield from _parts(value)
