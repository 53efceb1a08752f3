"""A model's folder: weights and configuration as transformers reads them, how it generates, and the files beside."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from slipstream.errors import SlipstreamError
from slipstream.model.loading import meta_model
from slipstream.model.tensors import storage_id, tied_names
from slipstream.model.toy import quiet_transformers

# Weights and optimizers of any library, and files that are written anew or would make the folder an adapter's.
_NOT_BESIDE = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.index.json"),
    *(CONFIG_NAME, GENERATION_CONFIG_NAME, "adapter_config.json", ".*"),
)


def write_model(
    folder: str | Path,
    config: PretrainedConfig,
    state: Mapping[str, Tensor],
    generation: GenerationConfig | None = None,
    beside: Path | None = None,
) -> None:
    """Writes config and safetensors of a whole model's state, as `AutoModelForCausalLM.from_pretrained` reads them, and
    how it generates; by default as follows from the config. Files `beside` the weights of a folder come along.

    Raises SlipstreamError where the state isn't that of the architecture, whose other weights would be random when the
    folder is loaded; then nothing is written. Also where a file can't be read back. Raises OSError where it can't be
    written.
    """
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    model = meta_model(config, dtype)
    check_state(model, state)
    tied = {name: names[0] for names in tied_names(model) for name in names}
    written: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, tensor in state.items():
        # A weight that layers share, unlike one that the architecture ties, is in the file under each name.
        other = first.setdefault(storage_id(tensor), name)
        written[name] = tensor if name == other or tied.get(name) == tied.get(other) else tensor.clone()
    try:
        with quiet_transformers():
            model.save_pretrained(folder, state_dict=written)
    # safetensors raises this for errors of the disk.
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if generation is not None:
        write_generation(folder, generation)
    if beside is not None:
        copy_beside(beside, Path(folder))
    _check_files(Path(folder))


def read_generation(path: str | Path) -> GenerationConfig | None:
    """Returns how the model in a folder, or of a name on the hub, generates; None where nothing says it."""
    try:
        generation: GenerationConfig = GenerationConfig.from_pretrained(str(path))
    except (OSError, ValueError):
        return None
    return generation


def write_generation(folder: str | Path, generation: GenerationConfig) -> None:
    """Writes generation_config.json as it is: transformers' own method refuses to write some that it reads."""
    Path(folder, GENERATION_CONFIG_NAME).write_text(generation.to_json_string(), encoding="utf-8")


def copy_beside(source: Path, folder: Path, left_out: Callable[[str], bool] | None = None) -> None:
    """Copies the files beside a model's weights, such as its tokenizer, chat template, licence and code, from the
    `source`, if that is a folder. Nothing in `folder` is replaced. `left_out` says which names to leave out."""
    # The source may also be a name on the hub.
    if not source.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        other = any(fnmatch(file.name, p) for p in _NOT_BESIDE) or (left_out is not None and left_out(file.name))
        if file.is_file() and not other and not (folder / file.name).exists():
            # Without the mode: the run's own couldn't replace a file that can't be written to.
            shutil.copyfile(file, folder / file.name)


def check_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises SlipstreamError unless a state has the names and shapes of the model's, of tied weights one name each."""
    if misfits := state_misfits(model, state):
        raise SlipstreamError(
            f"the weights aren't those of {type(model).__name__}, which would load them with random ones in their "
            f"place: the pipeline's model {misfits}. Save what was trained by torch.save(pipe.state_dict(), path) on "
            "rank 0 instead; merge adapters into the model before the Pipeline takes it."
        )


def state_misfits(model: nn.Module, state: Mapping[str, Tensor]) -> str:
    """Returns which of the model's weights a state lacks, has in addition or in another shape; "" where it has each,
    of tied ones one name at least."""
    expected = model.state_dict()
    present = set(state)
    lacking = [tied[0] for tied in tied_names(model) if present.isdisjoint(tied)]
    unknown = [name for name in state if name not in expected]
    other = [name for name in state if name in expected and state[name].shape != expected[name].shape]
    problems = {"lacks": lacking, "has in addition": unknown, "has in another shape": other}
    return ", ".join(f"{what} {_some(these)}" for what, these in problems.items() if these)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"


def _check_files(folder: Path) -> None:
    """Raises SlipstreamError where a new file isn't whole: opening a file compares its header's sizes."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise SlipstreamError(f"{file} was written, but can't be read back: {error}. Check the disk.") from error
