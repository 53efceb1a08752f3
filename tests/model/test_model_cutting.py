"""Placeholders of what other stages compute stand for what models' code does with it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from slipstream.model.cutting import EmptyEmbedding, PassThrough


def empty_embedding() -> EmptyEmbedding:
    return EmptyEmbedding(nn.Embedding(7, 4), 4, torch.float64, torch.device("cpu"))


def takes_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.element_size()


def test_an_embedding_elsewhere_takes_no_memory() -> None:
    embedding, ids = empty_embedding(), torch.zeros(2, 5, dtype=torch.int64)
    first, second, third = (embedding(ids) for _ in range(3))
    assert first.shape == second.shape == third.shape == (2, 5, 4)
    assert not takes_memory(second)
    assert not takes_memory(third)


def test_an_embedding_elsewhere_may_be_changed_in_place() -> None:
    embedding, ids = empty_embedding(), torch.zeros(2, 5, dtype=torch.int64)
    for _ in range(3):
        found = embedding(ids)
        found += 1
        assert torch.equal(found, torch.ones_like(found))


class Layer(nn.Module):
    """A layer off which a model may read attributes of its class and of its parts."""

    attention_type = "sliding_attention"

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Module()
        self.mixer.num_patches = 9
        self.mixer.adapters = nn.ModuleDict({"en": nn.Linear(2, 2), "de": nn.Linear(2, 2)})
        self.mixer.blocks = nn.ModuleList([nn.Dropout(0.25), nn.Linear(3, 2)])


def test_a_layer_elsewhere_keeps_what_models_read_off_its_parts() -> None:
    layer = copy.deepcopy(PassThrough(Layer()))
    assert layer.attention_type == "sliding_attention"
    assert layer.mixer.num_patches == 9
    assert list(layer.mixer.adapters.keys()) == ["en", "de"]
    assert [layer.mixer.blocks[0].p, layer.mixer.blocks[1].in_features] == [0.25, 3]


def test_a_layer_elsewhere_has_no_parts_that_run() -> None:
    layer = PassThrough(Layer())
    assert list(layer.children()) == list(layer.parameters()) == []
    with pytest.raises(NotImplementedError):
        layer.mixer.blocks[1](torch.zeros(3))
