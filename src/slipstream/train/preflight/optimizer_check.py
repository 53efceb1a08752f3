"""Checks that the optimizer fits what is trained and how it is split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.model import meta_model
from slipstream.options import SHARED_WORK
from slipstream.train.config import Config
from slipstream.train.optimizers import OptimizerTraits, check_arguments, check_schedule, try_optimizer
from slipstream.train.recorded_plan import is_open

_COUNTED = 2  # tensors of a parameter's size counted by memory.limit, for AdamW
_STEPS = 1000  # placeholder for a number of epochs that isn't counted yet


def check_optimizer(config: Config, model_config: Any) -> None:
    """Checks the optimizer and its schedule, on toys with the model's numbers of dimensions.

    Raises:
        SlipstreamError: with the given value, the allowed ones and the setting to type.
    """
    settings = config.optimizer
    check_arguments(settings)
    traits = try_optimizer(settings, _dims(config, model_config))
    check_schedule(settings, config.training.steps or _STEPS)
    if traits.reach != "element" and (cut := next(_cuts(config, traits), None)):
        setting, instead = cut
        sees = "the whole gradient of a parameter" if traits.reach == "parameter" else "all parameters together"
        raise SlipstreamError(
            f"optimizer.name={settings.name} needs {sees}, of which {setting} leaves each rank a part; give {instead}, "
            "or an optimizer that updates each element by itself, such as adamw"
        )
    if traits.group_states:
        raise SlipstreamError(
            f"optimizer.name={settings.name} changes {', '.join(traits.group_states)} of its parameter groups, which "
            "checkpoints don't hold; give an optimizer that keeps its state by parameter, such as adamw"
        )
    if config.memory.limit is not None and traits.size > _COUNTED:
        raise SlipstreamError(
            f"memory.limit with optimizer.name={settings.name}, which keeps {traits.size:.2g} tensors of each "
            f"parameter's size: the limit counts {_COUNTED}. Leave memory.limit out, or give adamw"
        )


def _dims(config: Config, model_config: Any) -> set[int]:
    """Returns the numbers of dimensions of the trained parameters."""
    if config.lora is None:
        return {weight.ndim for weight in meta_model(model_config).parameters()}
    lora = config.lora.peft_config(str(config.model.path))
    dims = {1, 2} if lora.use_dora or lora.bias != "none" else {2}
    copies = tuple(lora.modules_to_save or ())
    whole = meta_model(model_config).named_modules() if copies else ()
    return dims | {weight.ndim for name, module in whole if name.endswith(copies) for weight in module.parameters()}


def _cuts(config: Config, traits: OptimizerTraits) -> Iterator[tuple[str, str]]:
    """Yields the settings that leave a rank only a part of the elements that the optimizer must see, and the remedy."""
    parallel = config.parallel
    pipeline = config.pipeline
    for each in SHARED_WORK:
        if each.splits_weights and (size := getattr(parallel, each.degree)) > 1:
            yield f"parallel.{each.degree}={size}", f"parallel.{each.degree}=1"
    if parallel.num_copies > 1 and parallel.shard != "none":
        yield f"parallel.shard={parallel.shard}", "parallel.shard=none"
    if traits.reach == "model" and pipeline.num_ranks > 1:
        yield f"pipeline.num_ranks={pipeline.num_ranks}", "pipeline.num_ranks=1"
    may_spread = pipeline.vocabulary == "spread" or (pipeline.vocabulary == "auto" and is_open(config))
    if may_spread and pipeline.num_ranks > 1:
        yield f"pipeline.vocabulary={pipeline.vocabulary}", "pipeline.vocabulary=whole"
