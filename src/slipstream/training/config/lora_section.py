"""The section of a configuration that trains an adapter by LoRA in place of the model's weights."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from slipstream.model.adapters import read_adapter_config
from slipstream.options import Record


class LoraSection(Record):
    """An adapter by LoRA that is trained in place of the model's weights, with the settings of PEFT's LoraConfig."""

    path: str | None = None
    """A folder of an adapter that PEFT, or an earlier run's export, has saved: it is trained further, with its own
    settings; of those here only `export` may be given with it."""
    r: PositiveInt = 8
    """The rank of each update."""
    alpha: PositiveFloat = 16
    """The update is scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapter's input."""
    target_modules: str | list[str] = "all-linear"
    """The names of the modules that get an adapter, such as `[q_proj, v_proj]`, or a pattern. all-linear: every linear
    layer but the head."""
    exclude_modules: str | list[str] | None = None
    """Names of modules, or a pattern, that get none."""
    layers_to_transform: list[int] | None = None
    """The layers that get adapters. Default: all. The backward ends at the lowest."""
    modules_to_save: list[str] | None = None
    """Modules, by the ends of their names, of which a copy is trained as a whole, such as `[lm_head]`."""
    bias: Literal["none", "lora_only", "all"] = "none"
    """lora_only: the biases of modules with an adapter are trained too; all: every bias of the model."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r)."""
    use_dora: bool = False
    """Train the length of each weight's rows apart from their direction."""
    rank_pattern: dict[str, int] = Field(default={})
    """Other ranks by the modules' names."""
    alpha_pattern: dict[str, float] = Field(default={})
    """Other alphas by the modules' names."""
    init: Literal["default", "gaussian"] = "default"
    """The distribution from which the first factor is drawn, by `training.seed`; the second is zero."""
    export: Literal["adapter", "merged", "both"] = "both"
    """What is exported. adapter: the folder `adapter/`, which PEFT loads. merged: the whole model, in `model/`."""

    @model_validator(mode="after")
    def _named_targets(self) -> Self:
        if self.layers_to_transform is not None and isinstance(self.target_modules, str):
            raise ValueError(
                f"lora.layers_to_transform needs a list of names in lora.target_modules, such as [q_proj, v_proj], not "
                f"{self.target_modules!r}"
            )
        return self

    @model_validator(mode="after")
    def _path_alone(self) -> Self:
        """Refuses settings beside a saved adapter, which has its own."""
        if self.path is None:
            return self
        fields = type(self).model_fields
        given = [
            name
            for name, field in fields.items()
            if name not in ("path", "export") and getattr(self, name) != field.default
        ]
        if given:
            raise ValueError(
                f"lora.path={self.path} is an adapter with settings of its own; leave lora.{given[0]} out, or "
                "lora.path for a new adapter"
            )
        return self

    def source(self, base: str) -> Any:
        """Returns the saved adapter's folder, or the configuration of a new one for the model at `base`."""
        return self.peft_config(base) if self.path is None else self.path

    def peft_config(self, base: str) -> Any:
        """Returns PEFT's configuration of the adapter, for the model at `base`.

        Raises SlipstreamError where that of `path` can't be read.
        """
        from peft import LoraConfig

        if self.path is not None:
            return read_adapter_config(self.path, base, "lora.path")
        same = (
            "r", "target_modules", "exclude_modules", "layers_to_transform", "modules_to_save", "bias", "use_rslora",
            "use_dora", "rank_pattern", "alpha_pattern",
        )  # fmt: skip
        return LoraConfig(
            **{name: getattr(self, name) for name in same},
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            init_lora_weights=True if self.init == "default" else self.init,
            base_model_name_or_path=base,
            task_type="CAUSAL_LM",
        )
