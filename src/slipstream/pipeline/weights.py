"""The weights of a pipeline: where they come from, and how they are gathered and written."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from slipstream.errors import SlipstreamError
from slipstream.model import (
    ModelAnatomy,
    NewTokens,
    PipelineStage,
    StagePart,
    check_unquantised,
    load_config,
    meta_model,
    pretrained_model,
    storage_id,
    switch_off_dropout,
    tied_names,
)
from slipstream.model.adapters import (
    ALL_WEIGHTS,
    Adapter,
    TrainedWeights,
    adapted_model,
    adapter_of,
    add_adapter,
    check_method,
    check_saved_weights,
    find_frozen,
    freeze,
    quiet_peft,
    read_adapter_config,
    saves_ends,
)
from slipstream.model.given_model import GivenModel, compare_with_config
from slipstream.model.quantised import (
    BasePrecision,
    check_base_precision,
    check_quantisable,
    quantise,
    quantised_names,
    round_to_4_bits,
)
from slipstream.model.toy import quiet_transformers
from slipstream.model.weight_gradients import compiled_modules
from slipstream.parallel import ParameterShare, Ranks, receive_tensor, send_tensor
from slipstream.pipeline.parameters import Parameters


class WeightSource(NamedTuple):
    """A model that need not be in memory yet: `load` makes the given layers of it, in a dtype."""

    config: PretrainedConfig
    load: Callable[[ModelAnatomy, list[StagePart], torch.dtype | None], PreTrainedModel]
    compiled: tuple[str, ...] = ()  # modules that torch.compile runs
    trained: TrainedWeights = ALL_WEIGHTS
    given: GivenModel | None = None  # how a model in memory differs from the configuration's
    beside: Path | None = None  # the folder of files beside the weights, which come with saved ones


def pretrained_source(
    path: str,
    freeze: Sequence[str],
    lora: Any = None,
    lora_seed: int = 0,
    beside: Path | None = None,
    config: PretrainedConfig | None = None,
    base_precision: BasePrecision = "full",
    new_tokens: NewTokens | None = None,
) -> WeightSource:
    """Returns the model of a folder or of a name on the hub as a source, as `Pipeline.from_pretrained` takes it; the
    files beside its weights are in that folder, or in `beside`. `config` may have more tokens than the folder's, and
    `new_tokens` may lie in the padding of its rows.

    Raises SlipstreamError where it can't be trained so.
    """
    config = load_config(path) if config is None else config
    load = partial(pretrained_model, path, config, new_tokens=new_tokens)
    source = WeightSource(config, load, beside=beside or Path(path))
    source = with_frozen(source, freeze)
    check_base_precision(base_precision, lora)
    return source if lora is None else _with_adapter(source, lora, lora_seed, path, base_precision)


def _with_adapter(source: WeightSource, lora: Any, seed: int, base: str, base_precision: BasePrecision) -> WeightSource:
    """Returns a source whose model, which is at `base`, gets an adapter: by a LoraConfig of PEFT, or of a saved folder.

    Raises SlipstreamError where it can't be trained, or a folder's isn't one of this model.
    """
    saved = lora if isinstance(lora, (str, Path)) else None
    config = lora if saved is None else read_adapter_config(saved, base)
    check_method(config)
    adapter = Adapter("default", config, base_precision)
    if adapter.on_4_bits:
        check_quantisable(meta_model(source.config), config, "lora_base_precision")
    if saved is not None:
        check_saved_weights(saved, adapted_model(meta_model(source.config), adapter), adapter)

    def load(anatomy: ModelAnatomy, parts: list[StagePart], dtype: torch.dtype | None) -> PreTrainedModel:
        model = source.load(anatomy, parts, dtype)
        whole = meta_model(source.config)
        names = quantised_names(whole) if adapter.on_4_bits else ()
        add_adapter(model, whole, config, seed, saved)
        quantise(model, names)
        return model

    return source._replace(load=load, trained=TrainedWeights(adapter=adapter))


def with_frozen(source: WeightSource, patterns: Sequence[str]) -> WeightSource:
    """Returns a source whose model has the parameters frozen that the patterns match.

    Raises SlipstreamError where a pattern matches none, or all together match every one.
    """
    if not patterns:
        return source
    names = find_frozen(meta_model(source.config), patterns)

    def load(anatomy: ModelAnatomy, parts: list[StagePart], dtype: torch.dtype | None) -> PreTrainedModel:
        model = source.load(anatomy, parts, dtype)
        freeze(model, names)
        return model

    return source._replace(load=load, trained=TrainedWeights(names))


def without_dropout(source: WeightSource) -> WeightSource:
    """Returns a source whose model drops nothing in training."""

    def load(anatomy: ModelAnatomy, parts: list[StagePart], dtype: torch.dtype | None) -> PreTrainedModel:
        model = source.load(anatomy, parts, dtype)
        switch_off_dropout(model)
        return model

    return source._replace(load=load)


def in_memory(model: object) -> WeightSource:
    """Returns a model as a source; raises SlipstreamError where it isn't one that a Pipeline takes."""
    if hasattr(model, "_orig_mod"):
        raise SlipstreamError(
            "model is what torch.compile returned, which can't be cut into stages. Give the model itself, and for "
            "fused norms and activations runtime=slipstream.Runtime(fused=True)."
        )
    model, adapter = adapter_of(model)
    if not isinstance(model, PreTrainedModel):
        raise SlipstreamError(
            f"model is a {type(model).__name__}; give a causal LM of transformers, for example "
            "AutoModelForCausalLM.from_pretrained(...), or an nn.Sequential without another forward or hooks."
        )
    if model.get_output_embeddings() is None:
        raise SlipstreamError(
            f"model is a {type(model).__name__}, which has no language-model head to predict tokens with. Give the "
            "causal LM: AutoModelForCausalLM.from_pretrained(...) or AutoModelForCausalLM.from_config(...)."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SlipstreamError(
            "model is on the meta device, so it has no weights. Use Pipeline.from_config(config, seed=...) or "
            "Pipeline.from_pretrained(folder): each rank then makes only its own layers."
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise SlipstreamError(
            "model was made within torch.inference_mode(), so it can't be trained. Make it outside of that."
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise SlipstreamError(
            "model has gradient checkpointing enabled, which would run its layers again outside of the schedule. "
            "Disable it on the model: memory=slipstream.Memory(recompute='full') does what it does."
        )
    check_unquantised(model.config)
    trained = TrainedWeights.of(model, adapter)
    given = compare_with_config(model, adapter)
    return WeightSource(given.config, lambda *_: model, tuple(compiled_modules(model)), trained, given)


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
    if not source.is_dir():  # but a name on the hub
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
    expected, present = model.state_dict(), set(state)
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


class _Part(NamedTuple):
    """The part of one tensor of the model's state that a rank has."""

    name: str
    share: ParameterShare
    shape: torch.Size
    dtype: torch.dtype


def gather_state(stages: Iterable[PipelineStage], ranks: Ranks, parameters: Parameters) -> dict[str, Tensor]:
    """Returns the unsplit model's state by its names on the leader, an empty dict on the others. Collective."""
    own_state = {name: parameters.whole(name, tensor) for stage in stages for name, tensor in stage.state().items()}
    mine = []
    for name, tensor in own_state.items():
        share = parameters.shares.get(name) or ParameterShare.whole(tuple(tensor.shape))
        if parameters.copies_of(name).rank == 0 and share.copy == 0:
            mine.append(_Part(name, share, tensor.shape, tensor.dtype))
    others, places, group = ranks.world.gather(mine), ranks.world.global_ranks, ranks.world.process_group
    if not ranks.leads:
        for part in mine:
            send_tensor(own_state[part.name].to(ranks.device).contiguous(), places[0], group)
        return {}
    whole: dict[str, Tensor] = {}
    for source, sent in enumerate(others):
        for part in sent:
            if source == 0:
                tensor = own_state[part.name]
            else:
                tensor = torch.empty(part.shape, dtype=part.dtype, device=ranks.device)
                receive_tensor(tensor, places[source], group)
            _put(part, tensor.cpu(), whole)
    return whole


def _put(part: _Part, tensor: Tensor, whole: dict[str, Tensor]) -> None:
    if part.share.is_whole:
        whole.setdefault(part.name, tensor)
        return
    if part.name not in whole:
        whole[part.name] = torch.empty(part.share.shape, dtype=part.dtype)
    part.share.put(tensor, whole[part.name])


def write_adapter(folder: str | Path, config: PretrainedConfig, adapter: Adapter, state: Mapping[str, Tensor]) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, as `PeftModel.from_pretrained` reads them.

    Raises SlipstreamError where the state isn't that of the adapted model.
    """
    from peft.utils import get_peft_model_state_dict

    model = _filled(config, adapter, state)
    ends: dict[str, bool] = {"save_embedding_layers": saves_ends(model.get_base_model())}
    adapter_state = get_peft_model_state_dict(model, adapter_name=adapter.name, **ends)
    on_host = {name: tensor.detach().cpu() for name, tensor in adapter_state.items()}
    try:
        model.save_pretrained(folder, selected_adapters=[adapter.name], **ends)
        place = Path(folder) if adapter.name == "default" else Path(folder, adapter.name)
        _check_file(place / "adapter_model.safetensors", on_host)
    except SafetensorError as error:  # what it makes of the disk's errors
        raise OSError(str(error)) from error


def merged_state(config: PretrainedConfig, adapter: Adapter, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of the model without adapters, whose weights have them added. `state` stays as it is.

    Raises SlipstreamError where the state isn't that of the adapted model, and for weights that aren't finite.
    """
    try:
        merged = _filled(config, adapter, state).merge_and_unload(safe_merge=True)
    except ValueError as error:  # of weights that aren't finite, or a method that can't be merged
        raise SlipstreamError(f"the adapter can't be merged into the model: {error}") from error
    return {name: tensor.detach() for name, tensor in merged.state_dict().items()}


def merged_with_base(model: PreTrainedModel, adapter: Adapter, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of a model, which it takes over, with the trained weights of an adapter merged into it; where
    the adapter is one of weights in 4 bits, into the values that these stand for.

    Raises SlipstreamError where these aren't the adapter's.
    """
    from peft import get_peft_model

    if adapter.on_4_bits:
        round_to_4_bits(model)
    with quiet_peft():
        adapted: Any = get_peft_model(model, copy.deepcopy(adapter.config), autocast_adapter_dtype=False)
    named = adapted.get_base_model().named_parameters()
    # with bias="all" PEFT trains biases that a copy has replaced, too
    expected = {name for name, parameter in named if parameter.requires_grad and ".original_module." not in name}
    if other := sorted(expected ^ trained.keys()):
        raise SlipstreamError(f"the checkpoint's weights aren't those of its adapter: {other[0]} is in one of the two.")
    adapted.get_base_model().load_state_dict(dict(trained), strict=False)
    return {name: tensor.detach() for name, tensor in adapted.merge_and_unload().state_dict().items()}


def _filled(config: PretrainedConfig, adapter: Adapter, state: Mapping[str, Tensor]) -> Any:
    """Returns the whole model with its adapter, over the tensors of a state."""
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    whole = meta_model(config, dtype)
    filled = dict(state)
    for names in tied_names(whole):
        present = [name for name in names if name in state]
        filled |= dict.fromkeys(names, state[present[0]]) if present else {}
    model = adapted_model(whole, adapter)
    base = model.get_base_model()
    result = base.load_state_dict(filled, strict=False, assign=True)
    lacking = [name for name in result.missing_keys if base.get_parameter(name).is_meta]
    if lacking or result.unexpected_keys:
        what = f"lacks {lacking[0]}" if lacking else f"has in addition {result.unexpected_keys[0]}"
        raise SlipstreamError(f"the weights aren't those of the model with its adapter {adapter.name!r}: it {what}.")
    base.tie_weights()
    return model.eval()


def _check_file(file: Path, expected: Mapping[str, Tensor]) -> None:
    """Raises SlipstreamError unless the file has the expected tensors, to the bit."""
    try:
        with safe_open(file, framework="pt") as written:
            names = set(written.keys())
            same = names == expected.keys() and all(
                torch.equal(written.get_tensor(name), tensor) for name, tensor in expected.items()
            )
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(f"{file} was written, but can't be read back: {error}. Check the disk.") from error
    if not same or not expected:
        raise SlipstreamError(f"{file} doesn't hold the adapter that was trained. Check the disk.")
