"""A few lines that say how a pipeline is cut and what runs in which order."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from slipstream.pipeline.engine import Engine
from slipstream.pipeline.families import CausalLMFamily


def summarise(engine: Engine) -> str:
    """Returns the lines, of what this rank knows: it never communicates."""
    lines = {
        "layers": _layers(engine),
        "schedule": _schedule(engine),
        "mesh": _mesh(engine),
        "parameters": _parameters(engine),
    }
    if engine.runner.graphs is not None:
        lines["CUDA graphs"] = str(engine.runner.graphs)
    family = engine.family
    name = family.config.model_type if isinstance(family, CausalLMFamily) else "an nn.Sequential"
    return "\n".join([f"Pipeline of {name}", *(f"  {key}: {line}" for key, line in lines.items())])


def _layers(engine: Engine) -> str:
    layout = engine.layout
    counts = " + ".join(f"{each.stop - each.start:g}" for each in layout.layers)
    num_stages = len(layout.layers)
    stages = "1 stage" if num_stages == 1 else f"{num_stages} stages"
    numbers = ", ".join(map(str, layout.order.placement))
    ranks = f"rank {numbers}" if num_stages == 1 else f"ranks {numbers}"
    head = "; the head's rows are spread over all ranks" if layout.spreads_vocabulary else ""
    return f"{counts} in {stages}, on {ranks}{head}"


def _schedule(engine: Engine) -> str:
    layout, settings = engine.layout, engine.settings
    number = layout.order.num_microbatches
    microbatches = "1 microbatch" if number == 1 else f"{number} microbatches"
    slices = settings.slices if isinstance(settings.slices, int) else ", ".join(map(str, settings.slices))
    name = "slices" if isinstance(settings.slices, int) else "slices of tokens"
    still = '; "auto" is still to be planned' if settings.is_tuning else ""
    return f"{layout.order.name}, {microbatches}, {name}: {slices}{still}"


def _mesh(engine: Engine) -> str:
    ranks = engine.ranks
    if ranks.world.size == 1:
        return f"one process, on {engine.device}"
    sizes = ", ".join(f"{axis.name}={group.size}" for axis, group in ranks.groups.items())
    mine = ", ".join(f"{group.rank} of {axis.name}" for axis, group in ranks.groups.items())
    return f"{sizes}; this is rank {mine}, on {engine.device}"


def _parameters(engine: Engine) -> str:
    parameters = [parameter for _, parameter in engine.parameters.named()]
    here = sum(each.numel() for each in parameters)
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    computes = _dtypes([each for stage in engine.stages.values() for each in stage.model.parameters()])
    updates = _dtypes(parameters)
    dtypes = computes if computes == updates else f"{computes}, updated in {updates}"
    which = "" if trained == here else f", of which {trained:,} are trained"
    return f"{here:,} on this rank{which}; {dtypes}"


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return " and ".join(sorted({str(each.dtype).removeprefix("torch.") for each in tensors}))
