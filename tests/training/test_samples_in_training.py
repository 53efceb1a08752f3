"""A run writes samples as it trains: what the exported model of that step continues, in the log and on its page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.errors import SlipstreamError
from slipstream.extras.run_page.run_record import read_run
from slipstream.extras.run_page.sections import run_sections
from slipstream.train.config.run_config import parse_config
from support.parameters import first_of
from support.tiny_training import metrics_of, run_training, tiny_training

HYBRID = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def settings(folder: Path, **model: object) -> dict[str, object]:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    found = tiny_training(5, 0, initializer_range=0.1, **model)
    found["data"]["files"] = [str(folder / "text.txt")]
    found["pipeline"] |= {"num_microbatches": 2}
    found["training"] |= {"export_every": 2, "output": str(folder / "run")}
    found["optimizer"] = {"lr": 0.01}
    found["sample"] = {"prompt": "the quick", "max_new_tokens": 12, "temperature": 0, "every": 2}
    return found


@pytest.mark.parametrize("model", first_of([{}, HYBRID]), ids=["llama", "hybrid"])
def test_a_sample_is_what_the_export_of_its_step_continues(tmp_path: Path, model: dict[str, object]) -> None:
    run = tmp_path / "run"
    ended = run_training(2, run, settings(tmp_path, **model))
    samples = [line for line in metrics_of(run) if "sample" in line]
    assert [line["step"] for line in samples] == [2, 4]
    for line in samples:
        folder = run / f"model-step-{line['step']}"
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer("the quick", return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            written = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        assert line["sample"] == tokenizer.decode(written, skip_special_tokens=True)
        assert f"step {line['step']}: the model continues 'the quick':\n{line['sample']}" in ended.stdout
    assert samples[0]["sample"] != samples[1]["sample"]
    page = run_sections(read_run(run, "run"))
    assert "<h3>step 4</h3>" in page
    assert "<h3>step 2</h3>" in page


def test_samples_need_a_prompt_and_all_logits(tmp_path: Path) -> None:
    given = settings(tmp_path)
    with pytest.raises(SlipstreamError, match=r"sample.every=2 needs a text to continue"):
        parse_config({**given, "sample": {"every": 2}})
    with pytest.raises(SlipstreamError, match=r"sample.every=2 with pipeline.vocabulary=spread"):
        parse_config({**given, "pipeline": {"vocabulary": "spread", "slices": 4}})
