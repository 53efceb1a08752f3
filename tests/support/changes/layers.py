"""Layers that are deleted, added, exchanged or repeated."""

from __future__ import annotations

import copy
from typing import Any

from support.changes.change import EITHER, USES, change, everywhere_in


@change(
    "layer deleted", "`del model.model.layers[1]`, the configuration as it was", num_layers=3, save_pretrained=EITHER
)
def _(model: Any) -> None:
    del model.model.layers[1]


@change("layer deleted, configuration too", "the same with `num_hidden_layers` and `layer_idx` adapted", num_layers=3)
def _(model: Any) -> None:
    del model.model.layers[1]
    renumber(model)


def renumber(model: Any) -> None:
    model.config.num_hidden_layers = len(model.model.layers)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number


@change("layer of Qwen 3 deleted", "the same of a model that lists its layers' types", of="qwen3", num_layers=3)
def _(model: Any) -> None:
    del model.model.layers[2]
    model.config.layer_types = model.config.layer_types[:3]
    renumber(model)


@change("layer appended", "`layers.append(copy.deepcopy(layers[3]))` with the configuration adapted", num_layers=5)
def _(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[3]))
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [*model.config.layer_types, model.config.layer_types[-1]]
    renumber(model)


@change(
    "layer appended that doesn't run",
    "the same with the configuration as it was: transformers runs the first four",
    names="layers",
    save_pretrained=EITHER,
    **everywhere_in([*USES], EITHER),
)
def _(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[3]))


@change("layers in another order", "two layers exchanged")
def _(model: Any) -> None:
    first, second = model.model.layers[0], model.model.layers[3]
    model.model.layers[0], model.model.layers[3] = second, first


@change(
    "layer twice in a stage",
    "one layer object at two places of a stage",
    names="layers",
    save_pretrained=EITHER,
    **everywhere_in([*USES], EITHER),
)
def _(model: Any) -> None:
    model.model.layers[3] = model.model.layers[2]


@change(
    "layer in two stages",
    "one layer object in two stages",
    names="layers",
    save_pretrained=EITHER,
    **everywhere_in([*USES], EITHER),
)
def _(model: Any) -> None:
    model.model.layers[3] = model.model.layers[0]
