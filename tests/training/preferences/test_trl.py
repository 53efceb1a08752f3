"""DPO, KTO, SimPO and ORPO: tokens, loss, gradients and rewards are those of TRL's own code in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream import Pipeline, Runtime
from slipstream.train.config import PreferenceSection
from slipstream.train.data import BatchSize, TokenBatch, TokenisedText, sequences_of
from slipstream.train.preferences import mean_rewards, preference_loss, reward_sums, with_lengths, with_reference_point
from slipstream.train.reference import log_probabilities
from slipstream.train.training_step import Evaluator
from support.architectures import BOUND, gradient_error, gradients, no_rounding_by_float, no_rounding_inside
from support.preference_pairs import RATED, WORDS, read, word_tokenizer

ROWS = [
    {"prompt": "say a", "chosen": " a b c a a c b a c", "rejected": " c"},
    {"prompt": "say b b b", "chosen": " b", "rejected": " a a a a a"},
    {"prompt": "say", "chosen": " c a", "rejected": " b a c c c b a b a b a c"},
    {"prompt": "say c", "chosen": " c c c c", "rejected": " a c c b"},
]
SECTIONS = {
    "dpo": PreferenceSection(beta=0.3),
    "kto": PreferenceSection(loss="kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7),
    "simpo": PreferenceSection(loss="simpo", beta=2.0, gamma=0.7, label_smoothing=0.1),
    "orpo": PreferenceSection(loss="orpo", beta=0.3),
}
SEQ_LEN = 32
NAMES = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}


@dataclass(frozen=True)
class Step:
    """What TRL makes of all rows with the loss of this name; tokens are without padding, in the order of a run."""

    name: str
    tokens: list[list[int]]
    loss: float
    gradients: dict[str, torch.Tensor]
    rewards: dict[str, float]
    reference_point: float = 0.0


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=len(WORDS), initializer_range=0.2, attn_implementation="eager")
    return LlamaForCausalLM(config).double()


@contextmanager
def no_rounding_in_trl() -> Iterator[None]:
    """TRL's product with the head's weights is summed in float64: it names float32, whatever the model's dtype."""
    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64})
    with pytest.MonkeyPatch.context() as patch, no_rounding_inside(), no_rounding_by_float():
        patch.setattr("trl.kernels.chunked_logprob.torch", wide)
        yield


def arguments(name: str, folder: Path) -> dict[str, Any]:
    """What the configurations of all trainers take."""
    own = {"output_dir": str(folder), "beta": SECTIONS[name].beta, "report_to": "none", "use_cpu": True, "bf16": False}
    has_reference = SECTIONS[name].has_reference
    return own | ({"activation_checkpointing": False} if has_reference else {"gradient_checkpointing": False})


def data(name: str) -> dict[str, Any]:
    return {"train_dataset": Dataset.from_list(RATED if name == "kto" else ROWS), "processing_class": word_tokenizer()}


def unpadded(inputs: dict[str, Any], prefix: str = "") -> list[list[int]]:
    both = zip(inputs[f"{prefix}input_ids"], inputs[f"{prefix}attention_mask"], strict=True)
    return [ids[mask == 1].tolist() for ids, mask in both]


def with_a_reference(name: str, folder: Path) -> Step:
    """One batch of all rows: the chosen answers, then the rejected ones; of KTO also prompts with another answer."""
    trl, section = pytest.importorskip("trl"), SECTIONS[name]
    settings, models = arguments(name, folder), (llama(0), llama(1))
    if name == "kto":
        settings |= {each: getattr(section, each) for each in ("desirable_weight", "undesirable_weight")}
        settings["per_device_train_batch_size"] = len(RATED)
        trainer = trl.KTOTrainer(models[0], ref_model=models[1], args=trl.KTOConfig(**settings), **data(name))
    else:
        trainer = trl.DPOTrainer(models[0], ref_model=models[1], args=trl.DPOConfig(**settings), **data(name))
    inputs = trainer.data_collator([*trainer.train_dataset])
    with no_rounding_in_trl():
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()

    metrics = {each: values[-1] for each, values in trainer._metrics["train"].items() if values}
    rewards = {own: metrics[f"rewards/{each}"] for own, each in NAMES.items() if f"rewards/{each}" in metrics}
    own = unpadded(inputs)
    first, second = (own, unpadded(inputs, "KL_")) if name == "kto" else (own[: len(ROWS)], own[len(ROWS) :])
    tokens = [each for both in zip(first, second, strict=True) for each in both]
    return Step(name, tokens, loss.item(), gradients(trainer.model), rewards, metrics.get("kl", 0.0))


def without_a_reference(name: str, folder: Path) -> Step:
    """One pair in each batch: TRL's mean of ORPO's cross-entropy is one over all tokens of a batch."""
    pytest.importorskip("trl.experimental")
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    settings, section = arguments(name, folder) | {"max_length": SEQ_LEN}, SECTIONS[name]
    simpo: dict[str, Any] = {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": section.gamma}
    simpo["label_smoothing"] = section.label_smoothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "orpo":
            trainer = ORPOTrainer(llama(0), args=ORPOConfig(**settings), **data(name))
        else:
            trainer = CPOTrainer(llama(0), args=CPOConfig(**settings, **simpo), **data(name))
    rows, total, metrics = [*trainer.train_dataset], 0.0, []
    trainer.model.eval()  # no dropout
    with no_rounding_in_trl():
        for row in rows:
            loss, found = trainer.get_batch_loss_metrics(trainer.model, trainer.data_collator([row]))
            (loss / len(rows)).backward()
            total += loss.item() / len(rows)
            metrics.append(found)
    tokens = [row[f"{which}_input_ids"] for row in rows for which in ("chosen", "rejected")]
    rewards = {
        own: float(sum(each[f"rewards/{there}"] for each in metrics)) / len(rows) for own, there in NAMES.items()
    }
    return Step(name, tokens, total, gradients(trainer.model), rewards)


@pytest.fixture(scope="module", params=[*SECTIONS])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Step:
    make = with_a_reference if SECTIONS[request.param].has_reference else without_a_reference
    return make(request.param, tmp_path_factory.mktemp("trl"))


def text_of(name: str) -> TokenisedText:
    """The rows as a run reads them."""
    text, said = read(RATED if name == "kto" else ROWS, SECTIONS[name].answers, SEQ_LEN)
    assert not said
    return text


def documents_of(text: TokenisedText) -> list[list[int]]:
    return [text.document(number).tolist() for number in range(text.num_documents)]


def pipeline(name: str, model: LlamaForCausalLM, schedule: str = "1f1b") -> Pipeline:
    """Two stages, and rows of several answers in slices of unequal lengths."""
    options = {"num_ranks": 2, "slices": 3, "num_microbatches": 2, "runtime": Runtime(self_check=False)}
    return Pipeline(copy.deepcopy(model), schedule=schedule, loss_fn=preference_loss(SECTIONS[name]), **options)


def batch_of(name: str, pipe: Pipeline) -> TokenBatch:
    """All rows, with what the loss takes of each: its log-probability by the model before, and so on, or lengths."""
    section, text = SECTIONS[name], text_of(name)
    number = text.num_documents // 2
    if not section.has_reference:
        return sequences_of([with_lengths(text, section)], "none", SEQ_LEN, None).batch(0, number)
    before = Evaluator(pipeline(name, llama(1)), None)
    (values,) = log_probabilities(before, [text], BatchSize(number), lambda _: None, 3 if section.is_rated else 0)
    if text.ratings is not None:
        values = np.stack([values, np.repeat(np.where(text.ratings, 1.0, -1.0), 2)], axis=1)
    batch = sequences_of([replace(text, values=values)], "none", SEQ_LEN, None).batch(0, number)
    return with_reference_point(Evaluator(pipe, None), batch) if section.is_rated else batch


def test_tokens_are_trls(theirs: Step) -> None:
    assert documents_of(text_of(theirs.name)) == theirs.tokens


def test_rated_pairs_are_trls_and_have_no_answer_to_their_own_prompt_for_another(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    settings = arguments("kto", tmp_path) | {"per_device_train_batch_size": 2 * len(ROWS)}
    trainer = trl.KTOTrainer(llama(0), llama(1), trl.KTOConfig(**settings), **data("pairs"))
    inputs = trainer.data_collator([*trainer.train_dataset])
    ours = documents_of(read(ROWS, "rated", SEQ_LEN)[0])
    theirs = unpadded(inputs)
    assert sorted(ours[::2]) == sorted(theirs)
    for mismatched in (ours[1::2], unpadded(inputs, "KL_")):
        assert not [each for each in mismatched if each in theirs]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_is_trls(theirs: Step, schedule: str) -> None:
    pipe = pipeline(theirs.name, llama(0), schedule)
    with no_rounding_inside():
        batch = batch_of(theirs.name, pipe)
        loss = pipe.step(batch.input_ids, batch.labels, sequence_values=batch.sequence_values)
    assert theirs.name == "kto" or all(len(set(each.slices)) > 1 for each in pipe.last_step.microbatches)
    assert float(loss) == pytest.approx(theirs.loss, rel=BOUND)
    assert gradient_error(theirs.gradients, gradients(pipe)) < BOUND
    assert batch.sequence_values is not None
    rewards = mean_rewards(reward_sums(pipe, batch.sequence_values, SECTIONS[theirs.name]))
    bound = BOUND if theirs.name == "dpo" else 1e-6  # TRL adds the others' up in float32
    assert {name: rewards[name] for name in theirs.rewards} == pytest.approx(theirs.rewards, rel=bound)
    assert len(theirs.rewards) == (3 if theirs.name == "kto" else 4)  # KTO's accuracy is ours alone
    if theirs.name == "kto":
        assert float(batch.sequence_values[0, 2]) == pytest.approx(theirs.reference_point, rel=BOUND)
        assert theirs.reference_point > 0.01  # else it would be 0 for any order


def test_an_answer_that_is_sure_has_finite_odds() -> None:
    function = preference_loss(PreferenceSection(loss="orpo")).function
    sums = torch.tensor([[-3.0, 0.0], [-3.0, -800.0]], dtype=torch.float64, requires_grad=True)
    loss = function(sums, torch.tensor([[2.0, 3.0], [2.0, 3.0]], dtype=torch.float64))
    assert torch.isfinite(loss).all()
    loss.sum().backward()
    assert torch.isfinite(sums.grad).all()
