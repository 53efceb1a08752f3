"""SimPO and ORPO: tokens, loss and gradients are those of TRL's trainers, computed by their own code in float64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset

from slipstream import Pipeline, Runtime
from slipstream.train.config import PreferenceSection, SourceSection
from slipstream.train.data import sequences_of
from slipstream.train.data.samples import SampleReader, tokenise_samples
from slipstream.train.preferences import mean_rewards, preference_loss, reward_sums, with_lengths
from support.architectures import BOUND, gradient_error, gradients, no_rounding_inside
from training.preferences.test_trl import ROWS, SEQ_LEN, llama, no_rounding_in_trl, tokenizer

SECTIONS = {
    "simpo": PreferenceSection(loss="simpo", beta=2.0, gamma=0.7, label_smoothing=0.1),
    "orpo": PreferenceSection(loss="orpo", beta=0.3),
}


def trainer_of(name: str, folder: Any, model: Any) -> Any:
    """TRL's trainer, which pads every batch to the longest answer."""
    pytest.importorskip("trl.experimental")
    section = SECTIONS[name]
    common = {"output_dir": str(folder), "beta": section.beta, "report_to": "none", "use_cpu": True, "bf16": False}
    common |= {"gradient_checkpointing": False, "max_length": SEQ_LEN}
    data = {"train_dataset": Dataset.from_list(ROWS), "processing_class": tokenizer()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "orpo":
            from trl.experimental.orpo import ORPOConfig, ORPOTrainer

            return ORPOTrainer(model, args=ORPOConfig(**common), **data)
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        more = {"loss_type": "simpo", "simpo_gamma": section.gamma, "cpo_alpha": 0.0}
        more["label_smoothing"] = section.label_smoothing
        return CPOTrainer(model, args=CPOConfig(**common, **more), **data)


@pytest.mark.parametrize("name", ["simpo", "orpo"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_is_trls(name: str, schedule: str, tmp_path: Any) -> None:
    """TRL takes a mean over all tokens of its batch for ORPO's cross-entropy, so it has one pair in each."""
    trainer = trainer_of(name, tmp_path, llama(0))
    rows, theirs, metrics = [*trainer.train_dataset], 0.0, []
    trainer.model.eval()  # no dropout
    with no_rounding_in_trl():
        for row in rows:
            loss, found = trainer.get_batch_loss_metrics(trainer.model, trainer.data_collator([row]))
            (loss / len(rows)).backward()
            theirs += loss.item() / len(rows)
            metrics.append(found)
    section = SECTIONS[name]
    reader = SampleReader(SourceSection(dataset="pairs"), "pairs", "completion", tokenizer(), None)
    text = with_lengths(tokenise_samples(ROWS, reader, "pairs", SEQ_LEN, print), section)
    tokens = [text.document(document).tolist() for document in range(text.num_documents)]
    answers = [row[f"{which}_input_ids"] for row in rows for which in ("chosen", "rejected")]
    assert tokens == answers
    batch = sequences_of([text], "none", SEQ_LEN, None).batch(0, len(ROWS))
    options = {"num_ranks": 2, "slices": 3, "num_microbatches": 2, "runtime": Runtime(self_check=False)}
    pipe = Pipeline(llama(0), schedule=schedule, loss_fn=preference_loss(section), **options)
    with no_rounding_inside():
        loss = pipe.step(batch.input_ids, batch.labels, sequence_values=batch.sequence_values)
    assert all(len(set(each.slices)) > 1 for each in pipe.last_step.microbatches)
    assert float(loss) == pytest.approx(theirs, rel=BOUND)
    assert gradient_error(gradients(trainer.model), gradients(pipe)) < BOUND
    assert batch.sequence_values is not None
    rewards = mean_rewards(reward_sums(pipe, batch.sequence_values, section))
    names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
    for own, name_there in names.items():
        mean = sum(found[f"rewards/{name_there}"] for found in metrics) / len(metrics)
        assert rewards[own] == pytest.approx(float(mean), rel=1e-6), own  # TRL's metrics are in float32


def test_an_answer_that_is_sure_has_finite_odds() -> None:
    function = preference_loss(PreferenceSection(loss="orpo")).function
    sums = torch.tensor([[-3.0, 0.0], [-3.0, -800.0]], dtype=torch.float64, requires_grad=True)
    loss = function(sums, torch.tensor([[2.0, 3.0], [2.0, 3.0]], dtype=torch.float64))
    assert torch.isfinite(loss).all()
    loss.sum().backward()
    assert torch.isfinite(sums.grad).all()
