"""Makes tiny configurations of an architecture: its defaults, and what else it offers that slices could get wrong.

Windows and whatever else counts tokens are smaller than the first slices, and every kind of layer is there twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from slipstream.model.toy import toy_config

ALL_ELSE = "all else"  # the variant with a tied head, biases, caps, one head of keys, and every switch flipped
WINDOW, THRESHOLD = 5, 24  # tokens
_OFFERS = ("sliding_window", "attention_window", "window_size", "local_attention")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "attn_logit_softcap", "logit_cap")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NOT_ITS_OWN = ("use_cache", "output_", "return_dict", "is_decoder", "is_encoder_decoder", "add_cross", "tie_", "_")
_Changes = Callable[[PretrainedConfig], bool]  # returns whether the architecture offers this


def variants(config: PretrainedConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yields tiny configurations that differ from the given one, by name."""
    yield from _changed(config, _VARIANTS)


def alone(config: PretrainedConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    """Yields tiny configurations with one of the changes that the variant ALL_ELSE makes at once."""
    switches = _own_switches(tiny_config(config).get_text_config())
    yield from _changed(config, _ELSE | {name: partial(_flip, switches=[name]) for name in switches})


def combined(config: PretrainedConfig, dice: random.Random) -> tuple[list[str], PretrainedConfig]:
    """Returns a tiny configuration with some of the changes, drawn at random, and their names."""
    changed, names = tiny_config(config), list[str]()
    changes = {name: change for name, change in (_VARIANTS | _ELSE).items() if name != ALL_ELSE}
    switches = _own_switches(changed.get_text_config())
    changes |= {name: partial(_flip, switches=[name]) for name in dice.sample(switches, min(1, len(switches)))}
    for name, change in changes.items():
        if dice.random() < 0.15:
            with suppress(AttributeError, RuntimeError):  # as above
                if change(changed.get_text_config()):
                    names.append(name)
    return names, changed


def _changed(config: PretrainedConfig, changes: Mapping[str, _Changes]) -> Iterator[tuple[str, PretrainedConfig]]:
    for name, change in changes.items():
        changed = tiny_config(config)
        with suppress(AttributeError, RuntimeError):  # of parts with other fields, and of values that layers differ in
            if change(changed.get_text_config()):
                yield name, changed


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration at toy size, without dropout."""
    tiny = toy_config(config)
    for part in (tiny, tiny.get_text_config()):
        for name in [name for name, value in vars(part).items() if isinstance(value, float)]:
            if "drop" in name or "jitter" in name:
                setattr(part, name, 0.0)
    return tiny


def _windows(text: PretrainedConfig) -> bool:
    """Turns windows on, in every second layer where layers have types."""
    names = [name for name in _OFFERS if hasattr(text, name)]
    for name in names:
        setattr(text, name, WINDOW)
    if hasattr(text, "use_sliding_window"):
        text.use_sliding_window = True
    kinds = getattr(text, "layer_types", None)
    if names and kinds and set(kinds) <= {_FULL, _SLIDING}:
        text.layer_types = [(_SLIDING, _FULL)[index % 2] for index in range(len(kinds))]
    return bool(names)


def _tied(text: PretrainedConfig) -> bool:
    """Ties the head to the embedding where it isn't, and unties it where it is."""
    is_tied = getattr(text, "tie_word_embeddings", None)
    text.tie_word_embeddings = not is_tied
    return is_tied is not None


def _biases(text: PretrainedConfig) -> bool:
    return _flip(text, [name for name, value in vars(text).items() if isinstance(value, bool) and "bias" in name])


def _own_switches(text: PretrainedConfig) -> list[str]:
    """Returns the names of the architecture's own switches, but for biases."""
    switches = [name for name, value in vars(text).items() if isinstance(value, bool)]
    return [name for name in switches if "bias" not in name and not name.startswith(_NOT_ITS_OWN)]


def _caps(text: PretrainedConfig) -> bool:
    names = [name for name in _CAPS if hasattr(text, name)]
    for name in names:
        setattr(text, name, 3.0)
    return bool(names)


def _one_key_head(text: PretrainedConfig) -> bool:
    has_several = (getattr(text, "num_key_value_heads", None) or 1) > 1
    if has_several:
        text.num_key_value_heads = 1
    return has_several


def _rope(rope_type: str) -> _Changes:
    def change(text: PretrainedConfig) -> bool:
        rope = getattr(text, "rope_parameters", None)
        if not rope:
            return False
        by_kind = [each for each in rope.values() if isinstance(each, dict)]
        for parameters in by_kind or [rope]:
            parameters.update(_rope_settings(text, rope_type, parameters))
        if rope_type == "dynamic":
            text.max_position_embeddings = THRESHOLD
        return True

    return change


def _rope_settings(text: PretrainedConfig, rope_type: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if rope_type == "dynamic":
        return {"rope_type": "dynamic", "factor": 2.0}
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size = getattr(text, "qk_rope_head_dim", None) or size
    pairs = int(size * parameters.get("partial_rotary_factor", 1.0)) // 2
    factors = {"long_factor": [2.0] * pairs, "short_factor": [1.0] * pairs}
    return {"rope_type": "longrope", "original_max_position_embeddings": THRESHOLD, "factor": 2.0, **factors}


def _flip(text: PretrainedConfig, switches: list[str]) -> bool:
    for name in switches:
        setattr(text, name, not getattr(text, name))
    return bool(switches)


def _all_else(text: PretrainedConfig) -> bool:
    changes = [change(text) for change in _ELSE.values()]
    return _flip(text, _own_switches(text)) or any(changes)


_ELSE: dict[str, _Changes] = {
    "tied the other way": _tied,
    "biases": _biases,
    "soft caps": _caps,
    "one head of keys": _one_key_head,
}
_VARIANTS: dict[str, _Changes] = {
    "windows": _windows,
    "rope dynamic": _rope("dynamic"),
    "rope longrope": _rope("longrope"),
    ALL_ELSE: _all_else,
}
