"""Tokens, loss and gradients of pairs are those of TRL's trainer, computed by its own code in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream import Pipeline, Runtime
from slipstream.train.config import PreferenceSection, SourceSection
from slipstream.train.data import TokenisedText, sequences_of
from slipstream.train.data.samples import SampleReader, tokenise_samples
from slipstream.train.preferences import mean_rewards, preference_loss, reward_sums
from support.architectures import BOUND, gradient_error, gradients, no_rounding_by_float, no_rounding_inside

ROWS = [
    {"prompt": "say a", "chosen": " a b c a a c b a c", "rejected": " c"},
    {"prompt": "say b b b", "chosen": " b", "rejected": " a a a a a"},
    {"prompt": "say", "chosen": " c a", "rejected": " b a c c c b a b a b a c"},
    {"prompt": "say c", "chosen": " c c c c", "rejected": " a c c b"},
]
WORDS = ["<end>", "<pad>", "say", "a", "b", "c"]
SECTION = PreferenceSection(beta=0.3)
SEQ_LEN = 32


@dataclass(frozen=True)
class Step:
    """What TRL makes of all pairs."""

    tokens: list[list[int]]  # without padding: the chosen answers, then the rejected ones
    loss: float
    gradients: dict[str, torch.Tensor]
    rewards: dict[str, float]


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


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


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Step:
    trl = pytest.importorskip("trl")  # it is in the lock; a later version may not go with another transformers
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        beta=SECTION.beta,
        report_to="none",
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
    )
    data = {"train_dataset": Dataset.from_list(ROWS), "processing_class": tokenizer()}
    trainer = trl.DPOTrainer(llama(0), ref_model=llama(1), args=arguments, **data)
    inputs = trainer.data_collator([*trainer.train_dataset])
    with no_rounding_in_trl():
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    kept = [ids[mask == 1].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
    rewards = {own: trainer._metrics["train"][f"rewards/{name}"][0] for own, name in names.items()}
    return Step(kept, loss.item(), gradients(trainer.model), rewards)


@pytest.fixture(scope="module")
def pairs() -> TokenisedText:
    """The same pairs as a run reads them, with their log-probabilities by the model before."""
    reader = SampleReader(SourceSection(dataset="pairs"), "pairs", "completion", tokenizer(), None)
    text = tokenise_samples(ROWS, reader, "pairs", SEQ_LEN, print)
    batch = sequences_of([text], "none", SEQ_LEN, None).batch(0, len(ROWS))
    reference = pipeline(llama(1), schedule="1f1b")
    with no_rounding_inside():
        none = torch.zeros(2 * len(ROWS), dtype=torch.float64)
        reference.evaluate(batch.input_ids, batch.labels, sequence_values=none)
    return replace(text, values=reference.sequence_log_probabilities().numpy())


def pipeline(model: LlamaForCausalLM, schedule: str) -> Pipeline:
    """Two stages, and rows of several pairs in slices of unequal lengths."""
    options = {"num_ranks": 2, "slices": 3, "num_microbatches": 2, "runtime": Runtime(self_check=False)}
    return Pipeline(copy.deepcopy(model), schedule=schedule, loss_fn=preference_loss(SECTION), **options)


def test_tokens_are_trls(theirs: Step, pairs: TokenisedText) -> None:
    tokens = [pairs.document(document).tolist() for document in range(pairs.num_documents)]
    assert tokens[::2] + tokens[1::2] == theirs.tokens


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_is_trls(theirs: Step, pairs: TokenisedText, schedule: str) -> None:
    batch = sequences_of([pairs], "none", SEQ_LEN, None).batch(0, len(ROWS))
    pipe = pipeline(llama(0), schedule)
    with no_rounding_inside():
        loss = pipe.step(batch.input_ids, batch.labels, sequence_values=batch.sequence_values)
    assert all(len(set(each.slices)) > 1 for each in pipe.last_step.microbatches)
    assert float(loss) == pytest.approx(theirs.loss, rel=BOUND)
    assert gradient_error(theirs.gradients, gradients(pipe)) < BOUND
    assert batch.sequence_values is not None
    rewards = mean_rewards(reward_sums(pipe, batch.sequence_values, SECTION))
    assert rewards == pytest.approx(theirs.rewards, rel=BOUND)
