"""What people try on a Pipeline, its model and its loss as on any module has an answer of one line."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
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
        (lambda pipe: pipe.nonsense, "a Pipeline has no attribute 'nonsense'$"),
    ],
)
def test_what_a_module_has(pipe: Pipeline, call: Callable[[Any], object], answer: str) -> None:
    with pytest.raises((AttributeError, SlipstreamError), match=answer):
        call(pipe)


def test_a_compiled_pipeline(pipe: Pipeline) -> None:
    """Torch compiles whatever can be called, when it is called: then the Pipeline answers."""
    compiled = torch.compile(pipe, backend="eager")
    with pytest.raises(Exception, match=r"call pipe.step\(inputs, labels\)"):
        compiled(tokens())


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
