"""`slipstream check`: checks whether a model can be trained in token slices."""

from __future__ import annotations

from typing import Annotated

from typer import Argument


def check(model: Annotated[str, Argument(help="A model folder, hub name or training configuration (.yaml).")]) -> None:
    """Compare a sliced and an unsliced toy of MODEL's architecture: every layer and every gradient."""
    from pathlib import Path

    from slipstream.model import check_sliceable
    from slipstream.training.config import ModelSection, load_config
    from slipstream.training.preflight import load_model_config

    is_configuration = model.endswith((".yaml", ".yml"))
    section = load_config(Path(model)).model if is_configuration else ModelSection(path=model)
    result = check_sliceable(load_model_config(section))
    print(
        f"{result.model_type}: sliced and unsliced agree; largest relative difference "
        f"{result.output_error:.0e} in outputs, {result.gradient_error:.0e} in gradients "
        f"({result.num_layers} layers, float64, {result.seconds:.1f} s)"
    )
