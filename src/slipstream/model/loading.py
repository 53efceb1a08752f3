"""Builds models of which only the owned layers take memory, with random weights or from safetensors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Container
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from slipstream.errors import SlipstreamError
from slipstream.model.anatomy import ModelAnatomy
from slipstream.model.config import check_is_causal_lm, check_unquantised, in_a_line, load_config
from slipstream.model.cutting import keep_layers
from slipstream.model.layer_range import StagePart
from slipstream.model.tensors import storage_id, storage_ids
from slipstream.model.toy import quiet_transformers
from slipstream.model.weight_files import check_loaded, check_weight_files

_aten = torch.ops.aten
_FACTORIES = {_aten.empty.memory_format} | {
    factory.default for factory in (_aten.zeros, _aten.ones, _aten.full, _aten.randn, _aten.rand)
}
_SMALL = 1024  # elements of the largest tensor that is always real


class _Construction(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the tensors a model's constructor creates, and creates those numbered in `on_meta` without memory.

    If it `draws`, random numbers for a tensor without memory are drawn all the same, into a scratch tensor: the
    generator advances as if the whole model were there, so kept tensors get their numbers of the unsplit model.
    """

    def __init__(self, on_meta: Container[int], draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.created: list[Tensor] = []
        self.copied: list[tuple[int, int]] = []  # the storages of a copy's target, and of its source
        self._on_meta = on_meta
        self._draws = draws
        # One growing tensor per dtype, as freed ones would leave holes in the heap.
        self._scratch: dict[torch.dtype, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and "meta" not in str(kwargs.get("device")) and torch.Size(args[0]).numel() > _SMALL:
            place = {"device": "meta"} if len(self.created) in self._on_meta else {}
            self.created.append(func(*args, **kwargs | place))
            return self.created[-1]
        if args and isinstance(args[0], Tensor) and args[0].is_meta and torch.Tag.nondeterministic_seeded in func.tags:
            if self._draws:
                func(self._scratch_like(args[0]), *args[1:], **kwargs)
            return args[0]
        if func is _aten.copy_.default:
            self.copied.append((storage_id(args[0]), storage_id(args[1])))
        return func(*args, **kwargs)

    def _scratch_like(self, tensor: Tensor) -> Tensor:
        scratch = self._scratch.get(tensor.dtype)
        if scratch is None or scratch.numel() < tensor.numel():
            scratch = self._scratch[tensor.dtype] = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return scratch[: tensor.numel()].view(tensor.shape)


def random_model(
    config: PretrainedConfig,
    seed: int | None,
    anatomy: ModelAnatomy,
    owned: Collection[StagePart],
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Returns the parts `owned` of `torch.manual_seed(seed); AutoModelForCausalLM.from_config(config)`, to the bit.

    The rest is never in memory: the constructor runs twice, first without any memory to see which tensor becomes which
    parameter, then with memory for those that are kept. Without a seed only buffers are kept, such as rotary tables,
    which belong to every stage; parameters have no memory yet.
    """
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        with _Construction(on_meta=range(sys.maxsize), draws=False) as dry_run:
            model = _construct(config, dtype)
        kept_ids = storage_ids(model.buffers())
        if seed is not None:
            keep_layers(model, anatomy, owned, torch.device("meta"))
            kept_ids |= storage_ids(model.parameters())
            torch.manual_seed(seed)
        kept_ids |= {source for target, source in dry_run.copied if target in kept_ids}  # such as tables of positions
        on_meta = {i for i, tensor in enumerate(dry_run.created) if storage_id(tensor) not in kept_ids}
        with _Construction(on_meta, draws=seed is not None):
            model = _construct(config, dtype)
    keep_layers(model, anatomy, owned, torch.device("cpu"))
    return model


def model_for_timing(
    config: PretrainedConfig,
    anatomy: ModelAnatomy,
    owned: Collection[StagePart],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Returns the parts `owned` with arbitrary weights, drawn on `device`.

    This is faster than `random_model`, which takes minutes on a CPU for a large model: it draws the weights of all
    layers, once for torch's initialisation and once for transformers'.
    """
    model = random_model(config, None, anatomy, owned, dtype)
    generator = torch.Generator(device).manual_seed(0)
    drawn = {parameter: _draw(parameter, generator) for parameter in model.parameters()}  # once for tied parameters
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, drawn[parameter])
    return model


def _draw(parameter: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    drawn = torch.ones_like(parameter, device=generator.device)
    return nn.Parameter(drawn.normal_(std=0.02, generator=generator) if drawn.dim() > 1 else drawn)


def meta_model(config: PretrainedConfig, dtype: torch.dtype | None = None, **settings: Any) -> PreTrainedModel:
    """Returns the whole model on the meta device, which takes no memory; `settings` are passed to `from_config`.

    Raises SlipstreamError where transformers can't make it, as of a width that isn't a multiple of the heads.
    """
    try:
        with torch.device("meta"), quiet_transformers():
            return _construct(config, dtype, **settings)
    except Exception as error:  # the model's own code
        raise SlipstreamError(
            f"transformers can't make the {config.model_type!r} of this configuration: {in_a_line(error)}"
        ) from error


class NewTokens(NamedTuple):
    """Tokens missing from the model's own tokenizer. Their rows may lie in a matrix's padding, or be added to it."""

    ids: tuple[int, ...]
    num_known: int  # the rows of the model's own tokens, the first ones

    @classmethod
    def of_added_rows(cls, had: int, vocab_size: int) -> NewTokens:
        """Returns the tokens of the rows that a matrix without padding gets."""
        return cls(tuple(range(had, vocab_size)), had)


def pretrained_model(
    path: str,
    config: PretrainedConfig,
    anatomy: ModelAnatomy,
    owned: Collection[StagePart],
    dtype: torch.dtype | None = None,
    new_tokens: NewTokens | None = None,
    num_saved: int | None = None,
) -> PreTrainedModel:
    """Returns the parts `owned` of a model in a folder of safetensors or on the hub, reading no other tensor. Rows of
    `new_tokens`, by default of those that `config` has in addition to the folder's, are the mean of those of the known.
    `num_saved` is the number of tokens by the folder's own config.json, which is read only where it isn't given.

    Raises SlipstreamError for missing or damaged files, and for weights that the files don't contain, or in another
    shape.
    """
    check_unquantised(config)
    part = _partial_class(config, anatomy, owned)
    model = _read_model(part, path, config, num_saved, dtype=dtype or "auto", use_safetensors=True)
    _make_new_rows(model, config, new_tokens)
    return model


def _read_model(
    kind: Any, path: str, config: PretrainedConfig, num_saved: int | None, **settings: Any
) -> PreTrainedModel:
    """Returns a model of `kind` with the weights in a folder or on the hub, and as many tokens as these have rows for.

    Raises SlipstreamError for missing or damaged files, and for weights that aren't those of the configuration.
    """
    saved = _as_saved(config, path, num_saved)
    try:
        with quiet_transformers():
            model, report = kind.from_pretrained(
                path, config=saved, ignore_mismatched_sizes=True, output_loading_info=True, **settings
            )
    except (OSError, SafetensorError, RuntimeError) as error:
        if Path(path).is_dir() and settings.get("use_safetensors"):
            check_weight_files(Path(path), saved, _whole_class(config))
        raise SlipstreamError(
            f"the weights of {path!r} can't be read: {error}. Expected whole safetensors files; "
            "copy or download them again."
        ) from error
    check_loaded(path, config, report)
    result: PreTrainedModel = model
    return result


def check_saved_model(folder: Path, config: PretrainedConfig, num_saved: int | None = None) -> str:
    """Checks by the headers of its files that a folder has the weights of the causal LM of `config`, which may have
    more tokens than the `num_saved` of the folder's config.json. Returns a warning about those that it has in addition,
    or "".

    Raises SlipstreamError for missing or damaged files, for weights that aren't there or have another shape, and for a
    configuration of which no model can be made.
    """
    saved = _as_saved(config, str(folder), num_saved)
    # An architecture that can't be made at all raises here.
    meta_model(saved)
    return check_weight_files(folder, saved, _whole_class(config))


def whole_pretrained_model(
    path: str,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    new_tokens: NewTokens | None = None,
    num_saved: int | None = None,
) -> PreTrainedModel:
    """Returns the whole model in a folder of safetensors or on the hub, with rows for the tokens that `config` has in
    addition to the folder's; those of `new_tokens`, and `num_saved`, are as in `pretrained_model`."""
    if config is None:
        config = load_config(path)
        num_saved = config.get_text_config().vocab_size
    settings: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    model = _read_model(AutoModelForCausalLM, path, config, num_saved, trust_remote_code=False, **settings)
    _make_new_rows(model, config, new_tokens)
    return model


def set_vocab_size(config: PretrainedConfig, number: int) -> None:
    """Sets the number of tokens, and with it the rows of embedding and head, of a model that isn't made yet."""
    for part in {id(config): config, id(inner := config.get_text_config()): inner}.values():
        if hasattr(part, "vocab_size"):
            part.vocab_size = number


def _as_saved(config: PretrainedConfig, path: str, num_saved: int | None) -> PretrainedConfig:
    """Returns the config with as many tokens as the weights in a folder have rows for: `num_saved`, if it is known."""
    vocab_size = load_config(path).get_text_config().vocab_size if num_saved is None else num_saved
    if vocab_size != config.get_text_config().vocab_size:
        config = copy.deepcopy(config)
        set_vocab_size(config, vocab_size)
    return config


@torch.no_grad()
def _make_new_rows(model: PreTrainedModel, config: PretrainedConfig, new_tokens: NewTokens | None) -> None:
    """Gives the embedding and the head of a model or a part of one rows for the tokens that `config` has more, and new
    tokens their rows, in those and in the padding that was there.

    Each is the mean of the known tokens' rows, so that a new token is as likely as they are on average (Hewitt 2021).
    """
    vocab_size = config.get_text_config().vocab_size
    had = model.config.get_text_config().vocab_size
    new = new_tokens or NewTokens.of_added_rows(had, vocab_size)
    grown: dict[nn.Parameter, nn.Parameter] = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()) if new.ids else ():
        for name, old in [*module.named_parameters(recurse=False)] if module is not None else ():
            if old not in grown:
                known = old[: new.num_known]
                mean = known.to(torch.promote_types(old.dtype, torch.float32)).mean(0, keepdim=True).to(old.dtype)
                rows = torch.cat([old, mean.expand(vocab_size - had, *old.shape[1:])])
                rows[list(new.ids)] = mean
                grown[old] = nn.Parameter(rows, requires_grad=old.requires_grad)
            setattr(module, name, grown[old])
            for size in ("num_embeddings", "out_features"):
                if hasattr(module, size):
                    setattr(module, size, vocab_size)
    set_vocab_size(model.config, vocab_size)
    if hasattr(model, "vocab_size"):
        model.vocab_size = vocab_size


def _partial_class(config: PretrainedConfig, anatomy: ModelAnatomy, owned: Collection[StagePart]) -> Any:
    """Returns a subclass of the config's causal LM that removes all but `owned` after construction, before weights are
    read."""
    whole = _whole_class(config)

    def construct(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, *args, **kwargs)
        keep_layers(self, anatomy, owned, torch.device("cpu"))

    return type(whole.__name__, (whole,), {"__init__": construct, "__module__": whole.__module__})


def _whole_class(config: PretrainedConfig) -> Any:
    """Returns the class of the config's causal LM. Raises SlipstreamError where there is none."""
    check_is_causal_lm(config)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind[0] if isinstance(kind, tuple) else kind


def _construct(config: PretrainedConfig, dtype: torch.dtype | None, **settings: Any) -> PreTrainedModel:
    """Calls `from_config` on a copy of the config, since it writes the dtype into the config."""
    chosen = settings if dtype is None else settings | {"dtype": dtype}
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), **chosen)
