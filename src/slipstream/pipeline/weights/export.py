"""Gathers the stages' weights on one rank and writes them as transformers does."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from slipstream.errors import SlipstreamError
from slipstream.model import meta_model, storage_id
from slipstream.model.toy.toy_model import quiet_transformers
from slipstream.parallel import ParameterShare, Ranks, receive_tensor, send_tensor
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.stage import Stage

# Weights and their optimizers of any library, and what is written anew or would make the folder that of an adapter.
_NOT_BESIDE = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.index.json"),
    *(CONFIG_NAME, GENERATION_CONFIG_NAME, "adapter_config.json", ".*"),
)


def save_on_leader(write: Callable[[], None], ranks: Ranks) -> None:
    """Lets the leader, which has the whole model's state, write it. Collective.

    Raises SlipstreamError and OSError on every rank where `write` does on the leader.
    """
    problem = ranks.decided(lambda: _prevented(write))
    if problem is not None:  # no rank continues before the folder is complete
        raise problem


def _prevented(write: Callable[[], None]) -> OSError | None:
    """Returns what the disk prevented."""
    try:
        write()
    except OSError as error:
        return OSError(str(error))
    return None


def write_model(
    folder: str | Path,
    config: PretrainedConfig,
    state: Mapping[str, Tensor],
    generation: GenerationConfig | None = None,
    beside: Path | None = None,
) -> None:
    """Writes config and safetensors of a whole model's state, as `AutoModelForCausalLM.from_pretrained` reads them, and
    how it generates; by default what follows from the config. What lies `beside` the weights of a folder comes along.

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
    except SafetensorError as error:  # what it makes of the disk's errors
        raise OSError(str(error)) from error
    if generation is not None:
        write_generation(folder, generation)
    if beside is not None:
        copy_beside(beside, Path(folder))
    _check_files(Path(folder))


def read_generation(path: str | Path) -> GenerationConfig | None:
    """Returns how the model in a folder, or of a name on the hub, generates; None where nothing says it."""
    try:
        found: GenerationConfig = GenerationConfig.from_pretrained(str(path))
    except (OSError, ValueError):
        return None
    return found


def write_generation(folder: str | Path, generation: GenerationConfig) -> None:
    """Writes generation_config.json as it is: transformers' own method refuses to write some that it reads."""
    Path(folder, GENERATION_CONFIG_NAME).write_text(generation.to_json_string(), encoding="utf-8")


def copy_beside(source: Path, folder: Path, left_out: Callable[[str], bool] | None = None) -> None:
    """Copies what lies beside a model's weights, such as its tokenizer, chat template, licence and code, from the
    `source`, if that is a folder. Nothing in `folder` is replaced. `left_out` says which names to leave out."""
    if not source.is_dir():  # but a name on the hub
        return
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        other = any(fnmatch(file.name, each) for each in _NOT_BESIDE) or (left_out is not None and left_out(file.name))
        if file.is_file() and not other and not (folder / file.name).exists():
            # Without the mode: the run's own couldn't replace a file that can't be written to.
            shutil.copyfile(file, folder / file.name)


def check_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises SlipstreamError unless a state has the names and shapes of the model's, of tied weights one name each."""
    if found := state_misfits(model, state):
        raise SlipstreamError(
            f"the weights aren't those of {type(model).__name__}, which would load them with random ones in their "
            f"place: the pipeline's model {found}. Save what was trained by torch.save(pipe.state_dict(), path) on "
            "rank 0 instead; merge adapters into the model before the Pipeline takes it."
        )


def state_misfits(model: nn.Module, state: Mapping[str, Tensor]) -> str:
    """Returns which of the model's weights a state lacks, has in addition or in another shape; "" where it has each,
    of tied ones one name at least."""
    expected, present = model.state_dict(), set(state)
    lacking = [tied[0] for tied in tied_names(model) if present.isdisjoint(tied)]
    unknown = [name for name in state if name not in expected]
    other = [name for name in state if name in expected and state[name].shape != expected[name].shape]
    problems = {"lacks": lacking, "has in addition": unknown, "has in another shape": other}
    return ", ".join(f"{what} {_some(these)}" for what, these in problems.items() if these)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter: several where weights are tied."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [*names.values()]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more}"


def _check_files(folder: Path) -> None:
    """Raises SlipstreamError where what was just written isn't whole: opening a file compares its header's sizes."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise SlipstreamError(f"{file} was written, but can't be read back: {error}. Check the disk.") from error


class _Part(NamedTuple):
    """The part of one tensor of the model's state that a rank has."""

    name: str
    share: ParameterShare
    shape: torch.Size
    dtype: torch.dtype


def gather_state(stages: Iterable[Stage], ranks: Ranks, parameters: Parameters) -> dict[str, Tensor]:
    """Returns the unsplit model's state by its names on the leader, an empty dict on the others. Collective."""
    own = {name: _whole(tensor) for stage in stages for name, tensor in stage.state().items()}
    mine = []
    for name, tensor in own.items():
        share = parameters.shares.get(name) or ParameterShare.whole(tuple(tensor.shape))
        if ranks.copies.rank == 0 and share.copy == 0:
            mine.append(_Part(name, share, tensor.shape, tensor.dtype))
    others, places, group = ranks.world.gather(mine), ranks.world.global_ranks, ranks.world.process_group
    if not ranks.leads:
        for part in mine:
            send_tensor(own[part.name].to(ranks.device).contiguous(), places[0], group)
        return {}
    whole: dict[str, Tensor] = {}
    for source, sent in enumerate(others):
        for part in sent:
            if source == 0:
                tensor = own[part.name]
            else:
                tensor = torch.empty(part.shape, dtype=part.dtype, device=ranks.device)
                receive_tensor(tensor, places[source], group)
            _put(part, tensor.cpu(), whole)
    return whole


def _whole(tensor: Tensor) -> Tensor:
    """Returns the tensor with all its rows. Collective over the replicas where it is spread over them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _put(part: _Part, tensor: Tensor, whole: dict[str, Tensor]) -> None:
    if part.share.is_whole:
        whole.setdefault(part.name, tensor)
        return
    if part.name not in whole:
        whole[part.name] = torch.empty(part.share.shape, dtype=part.dtype)
    part.share.put(tensor, whole[part.name])
