"""What the exported model writes: loaded as anybody would load it."""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.training.config import SampleSection


def continue_text(folder: Path, sample: SampleSection, seed: int) -> str:
    """The prompt and its continuation by the model in `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(sample.prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    how = {"do_sample": True, "temperature": sample.temperature} if sample.temperature else {"do_sample": False}
    tokens = model.generate(**prompt, max_new_tokens=sample.max_new_tokens, pad_token_id=tokenizer.eos_token_id, **how)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))
