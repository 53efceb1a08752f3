"""What a Trainer and its callbacks see in place of a model: the Pipeline's configuration and this rank's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Never, Self

from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.model import meta_model
from slipstream.model.adapters import adapted_model
from slipstream.pipeline import Pipeline
from slipstream.pipeline.answers import ANSWERS


class PipelineModel(nn.Module):
    """A module without parameters of its own, that yields those of a Pipeline's rank and can't be called."""

    main_input_name = "input_ids"

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self.pipe, self.config = pipe, pipe.config

    @cached_property
    def unsplit(self) -> Any:
        """The unsplit model on the meta device, without memory: for names, which are the Pipeline's, and counts."""
        model = meta_model(self.config)
        return model if self.pipe.adapter is None else adapted_model(model, self.pipe.adapter).get_base_model()

    @property
    def loss_type(self) -> str | None:
        """The unsplit model's, by which a Trainer knows whether each row's first label is one that it divides by."""
        found: str | None = getattr(self.unsplit, "loss_type", None)
        return found

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether a Trainer divides by the labels of all batches that it accumulates, as it asks the unsplit model."""
        parameters = inspect.signature(self.unsplit.forward).parameters.values()
        by_signature = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        return bool(getattr(self.unsplit, "accepts_loss_kwargs", by_signature))

    def forward(self, labels: object = None, **columns: object) -> Never:
        """Raises SlipstreamError: a Pipeline's forward and backward are one call."""
        raise SlipstreamError(f"the model of a SlipstreamTrainer is cut over the ranks: {ANSWERS['forward']}")

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields what this rank's optimizer updates, under the unsplit model's names."""
        return self.pipe.named_parameters()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns the number of the unsplit model's parameters, as a model of transformers does."""
        return int(self.unsplit.num_parameters(only_trainable, exclude_embeddings))

    def train(self, mode: bool = True) -> Self:
        """Sets training mode, or evaluation mode."""
        if mode:
            self.pipe.train()
        else:
            self.pipe.eval()
        return super().train(mode)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Returns the whole model's state on rank 0, an empty dict on the others. Collective."""
        return self.pipe.state_dict()

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Writes the whole model. Collective: call it on every rank."""
        self.pipe.save_pretrained(folder)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if (answer := ANSWERS.get(name)) is None:
                raise
            raise AttributeError(f"the model of a SlipstreamTrainer has no attribute {name!r}: {answer}") from error
