"""The files of a run's model and of its tokenizer, each of which is read once."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import config_from_settings, load_config, read_generation, trust_remote_code
from slipstream.train.config import Config, ModelSection
from slipstream.train.data import load_tokenizer
from slipstream.train.data.chat_templates import with_special_tokens


def load_model_config(model: ModelSection) -> PretrainedConfig:
    """Returns the transformers configuration of a folder, a hub name or the settings themselves."""
    if model.path is not None:
        if model.trust_remote_code:
            trust_remote_code(model.path)
        return load_config(model.path)
    return config_from_settings(model.config or {}, "model.config")


class ModelFiles:
    """The configuration of a run's model, how it generates, and the tokenizers, each read when it is first asked for.

    Attributes:
        config: transformers' configuration, which gets the run's tokens.
        num_saved: tokens by the model's own config.json.
    """

    def __init__(self, config: Config, model_config: PretrainedConfig | None = None) -> None:
        """Reads the model's configuration, unless it is given. Raises SlipstreamError where that can't be read."""
        self._model = config.model
        self._data = config.data
        self._has_models_tokenizer = config.has_models_tokenizer
        self.config = load_model_config(config.model) if model_config is None else model_config
        self.num_saved: int = self.config.get_text_config().vocab_size

    @cached_property
    def generation(self) -> GenerationConfig | None:
        """How the pretrained model generates; None where nothing says it, and for random weights."""
        return read_generation(str(self._model.path)) if self._model.pretrained else None

    @property
    def stop_tokens(self) -> list[int]:
        """The tokens at which the exported model stops."""
        settings = (self.config.eos_token_id, None if self.generation is None else self.generation.eos_token_id)
        return [token for ids in settings if ids is not None for token in (ids if isinstance(ids, list) else [ids])]

    @cached_property
    def tokenizer(self) -> Any | None:
        """The tokenizer that the configuration names, with its special tokens; None where the run trains one.

        Raises SlipstreamError where it can't be read.
        """
        name = self._data.tokenizer or self._model.path
        if name is None or self._data.vocab_size is not None:
            return None
        tokenizer = self._own[0] if self._has_models_tokenizer else load_tokenizer(name)
        return with_special_tokens(tokenizer, self._data)

    @property
    def own_vocabulary(self) -> dict[str, int]:
        """The tokens of the model's own tokenizer, or of the one of `data.tokenizer` where its folder has none.

        Raises SlipstreamError where there is neither.
        """
        return self._own[1]

    @cached_property
    def _own(self) -> tuple[Any, dict[str, int]]:
        """The model's own tokenizer, and its tokens before the run's are added."""
        try:
            tokenizer = load_tokenizer(str(self._model.path), self._model.trust_remote_code)
        except SlipstreamError:
            if self._data.tokenizer is None:
                raise
            tokenizer = load_tokenizer(self._data.tokenizer)
        return tokenizer, tokenizer.get_vocab()
