"""What people try on a Pipeline, its model and its loss as on any module has an answer of one line."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import Pipeline, SlipstreamError
from support.architectures import ARCHITECTURES, build, tokens
from support.pipelines import make_pipe


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return make_pipe(ARCHITECTURES["llama"], slices=2)


@pytest.fixture
def loss(pipe: Pipeline) -> Tensor:
    return pipe.step(tokens(), tokens())


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda pipe: pipe.to("cpu"), "are where Pipeline\\(device=...\\) puts them"),
        (lambda pipe: pipe.cuda(), "for transformers' Trainer there is slipstream.extras.hf_trainer.SlipstreamTrainer"),
        (lambda pipe: pipe.gradient_checkpointing_enable(), "give Pipeline\\(memory=slipstream.Memory\\(recompute="),
        (lambda pipe: pipe(tokens()), "call pipe.step\\(inputs, labels\\), which runs forward and backward"),
        (lambda pipe: pipe.forward(tokens()), "call pipe.step\\(inputs, labels\\)"),
        (lambda pipe: pipe.compile(), "runtime=slipstream.Runtime\\(fused=True\\)"),
        (lambda pipe: pipe.push_to_hub("me/model"), "save_pretrained\\(folder\\), and on one rank"),
        (lambda pipe: pipe.resize_token_embeddings(9), "call it on the model before the Pipeline is made"),
        (lambda pipe: pipe.nonsense, "a Pipeline has no attribute 'nonsense'$"),
    ],
)
def test_what_a_module_has(pipe: Pipeline, call: Callable[[Any], object], answer: str) -> None:
    with pytest.raises((AttributeError, SlipstreamError), match=answer):
        call(pipe)


def test_a_compiled_pipeline(pipe: Pipeline) -> None:
    with pytest.raises(
        SlipstreamError, match=r"torch.compile of a Pipeline: .*runtime=slipstream.Runtime\(fused=True\)"
    ):
        torch.compile(pipe, backend="eager")


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, lambda pipe: torch.save(pipe, io.BytesIO())])
def test_a_copy(pipe: Pipeline, copied: Callable[[Any], object]) -> None:
    with pytest.raises(SlipstreamError, match=r"can't be copied or pickled.* pipe.save_pretrained\(folder\)"):
        copied(pipe)


def test_a_timeline_before_a_step() -> None:
    with pytest.raises(SlipstreamError, match=r"no timeline yet.* Call pipe.step\(inputs, labels\) first"):
        make_pipe(ARCHITECTURES["llama"]).timeline()


def test_a_batch_given_by_its_keys(pipe: Pipeline) -> None:
    batch = {"input_ids": tokens(), "labels": tokens()}
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(SlipstreamError, match=rf"give the batch as one argument, pipe.{call.__name__}\(batch\)"):
            call(**batch)  # type: ignore[arg-type]
        with pytest.raises(SlipstreamError, match="inputs are missing"):
            call(labels=tokens())
        with pytest.raises(TypeError, match="has no argument 'attention'"):
            call(tokens(), tokens(), attention=1)  # type: ignore[arg-type]


def test_a_file_where_the_model_is_to_be_saved(pipe: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    for folder in (tmp_path / "model", tmp_path / "model" / "deeper"):
        with pytest.raises(SlipstreamError, match=r"model is a file. Give another folder"):
            pipe.save_pretrained(folder)
    assert (tmp_path / "model").read_text() == "mine"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
def test_models_that_run_in_another_way() -> None:
    with pytest.raises(SlipstreamError, match=r"what torch.compile returned, .* runtime=slipstream.Runtime"):
        Pipeline(torch.compile(build(ARCHITECTURES["llama"])))  # type: ignore[arg-type]
    model = build(ARCHITECTURES["llama"])
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True  # as gradient_checkpointing_enable does
    with pytest.raises(SlipstreamError, match=r"Disable it on the model: memory="):
        Pipeline(model)


@pytest.mark.parametrize("part", [1, 4])
def test_a_backward_of_the_loss(loss: Tensor, part: int) -> None:
    with pytest.raises(SlipstreamError, match=r"has already run the backward.* leave out loss.backward\(\)"):
        (loss / part if part > 1 else loss).backward()


@pytest.mark.parametrize("scaled", [lambda loss: loss, lambda loss: loss / 4, lambda loss: [loss.detach()]])
def test_a_gradient_scaler(loss: Tensor, scaled: Callable[[Tensor], Any]) -> None:
    """It would find the gradients of `step`, which have no scale, and divide them by its own."""
    with pytest.raises(SlipstreamError, match=r"a GradScaler around pipe.step .* give step\(..., loss_scale=2"):
        torch.amp.GradScaler("cpu").scale(scaled(loss))
    assert torch.amp.GradScaler("cpu", enabled=False).scale(loss) is loss


def test_otherwise_the_loss_is_a_tensor(loss: Tensor) -> None:
    assert str(loss) == f"tensor({float(loss):.4f}, dtype=torch.float64)"
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    assert torch.stack([loss, loss * 2, 2 * loss]).tolist() == [float(loss), 2 * float(loss), 2 * float(loss)]
    file = io.BytesIO()
    torch.save({"loss": loss, "half": loss / 2}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert type(read["loss"]) is type(pickle.loads(pickle.dumps(loss))) is Tensor
    assert read["half"] == loss / 2
    assert type(copy.deepcopy(loss)) is Tensor
    weight = torch.ones(3, requires_grad=True)
    (loss + weight.sum()).backward()  # a penalty of the user's own, on this rank's parameters
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]
