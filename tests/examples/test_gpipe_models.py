"""The models of examples/gpipe are as large as the papers say, and compute what transformers' models compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from examples.gpipe import resnet, vit
from examples.gpipe.amoebanet import NORMAL, REDUCTION, Combine, amoebanet_d
from examples.gpipe.transformer import FeedForward, transformer, transformer_l
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from support.sequences.gpipe_models import CASES


def num_parameters(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


@pytest.mark.parametrize(
    ("num_cells", "num_filters", "millions"),
    [(18, 208, 82), (18, 416, 318), (18, 544, 542), (36, 544, 1050), (72, 512, 1800)],
)
def test_amoebanet_is_as_large_as_in_gpipes_table_1(num_cells: int, num_filters: int, millions: float) -> None:
    found = num_parameters(lambda: amoebanet_d(num_cells, num_filters)) / 1e6
    assert found == pytest.approx(millions, rel=0.025)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [((6, 8192, 16), 0.4), ((24, 8192, 16), 1.3), ((12, 16384, 32), 1.3), ((32, 16384, 32), 3), ((64, 16384, 32), 6)],
)
def test_transformer_is_as_large_as_in_gpipes_section_5(shape: tuple[int, int, int], billions: float) -> None:
    assert num_parameters(lambda: transformer(*shape)) / 1e9 == pytest.approx(billions, rel=0.05)


@pytest.mark.parametrize(("num_layers", "millions"), [(3, 282.2), (13, 785.8), (103, 5300)])
def test_transformer_l_is_as_large_as_in_gpipes_table_1(num_layers: int, millions: float) -> None:
    assert num_parameters(lambda: transformer_l(num_layers)) / 1e6 == pytest.approx(millions, rel=0.004)


def test_resnet_50_and_vit_b_16_are_as_large_as_published() -> None:
    assert num_parameters(resnet.resnet) == 25_557_032
    assert num_parameters(vit.vit) == 86_567_656


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_resnet_computes_what_transformers_does(mode: str) -> None:
    """Outputs, and in training the moving averages, from the same weights."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], num_labels=5)
    theirs = ResNetForImageClassification(config).double()
    ours = resnet.resnet((1, 2, 1), (16, 32, 64), 8, 5).double()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.weight)
    ours.load_state_dict(resnet.from_transformers(theirs.state_dict()))
    for model in (ours, theirs):
        model.train(mode == "train")
    images = torch.randn(2, 3, 70, 62, dtype=torch.float64)
    assert torch.allclose(ours(images), theirs(images).logits, rtol=1e-12, atol=1e-12)
    after = resnet.from_transformers(theirs.state_dict())
    assert all(torch.allclose(tensor, after[name]) for name, tensor in ours.state_dict().items())


def test_vit_computes_what_transformers_does() -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    theirs = ViTForImageClassification(config).double()  # attention by torch's own function, which keeps float64
    ours = vit.vit(3, 24, 48, 3, 16, 4, 5).double()
    ours.load_state_dict(vit.from_transformers(theirs.state_dict()))
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert torch.allclose(ours(images), theirs(images).logits, rtol=1e-12, atol=1e-12)


def test_vit_reads_the_names_of_older_files() -> None:
    old = {
        "vit.encoder.layer.7.attention.attention.query.weight": "attention7.query.weight",
        "vit.encoder.layer.7.attention.output.dense.bias": "attention7.output.bias",
        "vit.encoder.layer.7.intermediate.dense.weight": "feed_forward7.expand.weight",
        "vit.encoder.layer.7.output.dense.weight": "feed_forward7.reduce.weight",
        "vit.encoder.layer.7.layernorm_after.bias": "feed_forward7.norm.bias",
        "vit.embeddings.cls_token": "embed.class_token",
    }
    assert list(vit.from_transformers(dict.fromkeys(old, torch.zeros(())))) == list(old.values())
    with pytest.raises(KeyError, match="mask_token is no parameter"):
        vit.from_transformers({"vit.embeddings.mask_token": torch.zeros(())})


def test_amoebanet_cells_add_what_their_genotypes_say() -> None:
    """Computed with all states kept, against the layers, which hand on only what is still needed."""
    torch.manual_seed(0)
    model = amoebanet_d(3, 16, 5, small_images=True).double().eval()
    layers, outputs = dict(model.named_children()), {}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda _, args, output, name=name: outputs.__setitem__(name, output))
    model(torch.randn(2, 3, 12, 12, dtype=torch.float64))
    older = newer = outputs["stem"][0]
    for cell, genotype in enumerate((NORMAL, REDUCTION, NORMAL, REDUCTION, NORMAL)):
        states = list(layers[f"cell{cell}_enter"]((newer, older)))
        for i, ((left, _), (right, _)) in enumerate(genotype.combinations):
            layer = layers[f"cell{cell}_combine{i}"]
            assert isinstance(layer, Combine)
            states.append(layer.left(states[left]) + layer.right(states[right]))
        older, newer = newer, torch.cat([states[i] for i in genotype.concat], dim=1)
        assert torch.equal(newer, outputs[f"cell{cell}_concat"])


def test_amoebanet_takes_any_image_size() -> None:
    model = amoebanet_d(3, 16, 5).eval()
    assert model(torch.randn(1, 3, 75, 53)).shape == (1, 5)


def test_amoebanet_refuses_sizes_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="give a multiple of 3"):
        amoebanet_d(4, 16)
    with pytest.raises(ValueError, match="give a multiple of 16"):
        amoebanet_d(3, 20)


def test_feed_forward_weights_begin_smaller_in_deeper_models() -> None:
    """By the number of layers, as GPipe's section 5 asks."""

    def largest(num_layers: int) -> float:
        torch.manual_seed(0)
        return float(FeedForward(16, 32, num_layers).expand.weight.detach().abs().max())

    assert largest(12) == pytest.approx(largest(1) / 12)
    layers = [layer for layer in transformer(3, 8, 1, width=8, vocabulary=9) if isinstance(layer, FeedForward)]
    assert len(layers) == 6
    assert all(layer.reduce.weight.abs().max() <= 8**-0.5 / 3 for layer in layers)


def test_logits_are_clipped() -> None:
    case = CASES["transformer"]
    logits = case.model()(case.batch()[0])
    assert logits.abs().max() == 0.8
    assert (logits.abs() < 0.8).any()


def test_padding_changes_no_translation() -> None:
    case = CASES["transformer"]
    model = case.model()
    (source, target), _ = case.batch()
    padded = torch.cat([source, torch.zeros(len(source), 3, dtype=torch.int64)], dim=1)
    assert torch.allclose(model((padded, target)), model((source, target)), rtol=1e-12)


def test_a_prediction_knows_no_later_target() -> None:
    case = CASES["transformer"]
    model = case.model()
    (source, target), _ = case.batch()
    changed = target.clone()
    changed[:, 3:] = 1 + changed[:, 3:] % 22
    before, after = model((source, target)), model((source, changed))
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])
