"""What a Pipeline saves and loads: checkpoints, the model's folder, its state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from slipstream.pipeline.answers import PipelineFacts
from slipstream.pipeline.families.model_family import causal_lm
from slipstream.pipeline.saving.loop_checkpoint import load_loop, save_loop
from slipstream.pipeline.saving.update_rule import Scheduler
from slipstream.pipeline.weights import save_on_leader, write_model
from slipstream.pipeline.weights.adapter_export import write_adapter, write_merged


class PipelineSaving(PipelineFacts):
    """The part of a Pipeline that saves and loads."""

    def save(
        self,
        folder: str | Path,
        step: int,
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
        keep: int = 2,
        replace: bool = False,
    ) -> None:
        """Saves a checkpoint of this step in the folder and returns when it is complete; `load` goes on from it on any
        mesh. Collective. Of a model with an adapter it has the adapter alone.

        Args:
            folder: of checkpoints, on a disk that all ranks share.
            step: the number of steps so far; the checkpoint's name has it.
            optimizer: of any class, over `parameters()`.
            scheduler: of the learning rate.
            facts: anything else that the loop needs to go on: numbers, text, and lists and dicts of them; rank 0's.
            keep: how many of the newest checkpoints stay.
            replace: whether checkpoints of this step and later ones are set aside; else they are an error.

        Raises:
            SlipstreamError: on every rank, where it wasn't saved; earlier checkpoints stay as they are.
            NonFiniteError: on every rank, where something that is to be saved isn't finite.
        """
        save_loop(self._engine, (folder, step), optimizer, scheduler, facts, keep, replace)

    def load(
        self,
        folder: str | Path,
        step: int | Literal["latest", "last-good"] = "latest",
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Loads what `save` saved: this rank's part of the model, the optimizer's state and options, the scheduler and
        the state of dropout; returns the step and the facts. Collective.

        Args:
            folder: of checkpoints.
            step: which one; "last-good": the newest that isn't damaged.
            optimizer: of the class that was saved, with as many parameter groups. None loads weights alone.
            scheduler: of the class that was saved.

        Raises:
            SlipstreamError: on every rank and before anything changes, where there is no checkpoint, it is damaged, or
                it is of another model.
        """
        return load_loop(self._engine, (folder, step), optimizer, scheduler)

    def save_pretrained(self, folder: str | Path, merged: bool = False) -> None:
        """Writes the whole model as `AutoModelForCausalLM.from_pretrained` reads it; rank 0 writes. Collective.

        Of a `from_pretrained` folder it has what lies beside the weights, too, such as tokenizer and chat template.
        Of a model with an adapter it writes the adapter alone, as `PeftModel.from_pretrained` reads it, or with
        `merged` the model with the adapter added to its weights. Raises SlipstreamError for an nn.Sequential.
        """
        family = causal_lm(self._engine.family, "save_pretrained")
        state, config, adapter = self._engine.state_dict("save_pretrained"), family.config, family.adapter
        stage = next(iter(self._engine.stages.values()))
        generation = getattr(stage.model, "generation_config", None)  # of the model that was given, or of its folder
        beside, ranks = family.beside, self._engine.ranks
        if adapter is None:
            save_on_leader(lambda: write_model(folder, config, state, generation, beside), ranks)
        elif merged:
            save_on_leader(lambda: write_merged(folder, config, adapter, state, generation, beside), ranks)
        else:
            save_on_leader(lambda: write_adapter(folder, config, adapter, state), ranks)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the whole model's state by the unsplit model's names, in host memory, on rank 0; an empty dict on the
        others. Collective."""
        return self._engine.state_dict()
