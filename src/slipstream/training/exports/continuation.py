"""Lets an exported model continue a text, by transformers alone, as anybody would load it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from slipstream.errors import SlipstreamError
from slipstream.model import check_length
from slipstream.model.toy.toy_model import quiet_transformers
from slipstream.training.exports.model_choice import OpenedModel


@dataclass(frozen=True)
class TextWriter:
    """A model and its tokenizer, on one device."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase

    @classmethod
    def load(cls, opened: OpenedModel, device: str = "cpu") -> TextWriter:
        """Loads the weights. Raises SlipstreamError where they can't be loaded."""
        try:
            with quiet_transformers():
                model = AutoModelForCausalLM.from_pretrained(opened.path, trust_remote_code=opened.trusts_code)
        except (OSError, ValueError, SafetensorError) as error:
            raise SlipstreamError(f"can't load the model {opened.path}: {error}") from error
        return cls(model.to(device), opened.tokenizer)

    def check(self, prompt: str, max_new_tokens: int) -> None:
        """Raises SlipstreamError where the prompt has no tokens, or the text may become longer than the model takes."""
        num_tokens = len(self.tokenizer(prompt)["input_ids"])
        if num_tokens == 0:
            raise SlipstreamError(f"the prompt {prompt!r} has no tokens; give a text to continue")
        check_length(self.model.config, num_tokens + max_new_tokens, "the prompt's tokens and --max-new-tokens")

    def write(self, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
        """Returns the prompt and its continuation: of the likeliest tokens with `temperature` 0, else drawn."""
        inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(self.model.device)
        torch.manual_seed(seed)
        how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        end = self.tokenizer.eos_token_id
        tokens = self.model.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=end, **how)
        return str(self.tokenizer.decode(tokens[0], skip_special_tokens=True))
