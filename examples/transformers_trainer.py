"""Trains by a Trainer of transformers on a Pipeline, and goes on after an interruption:

torchrun --nproc-per-node=2 examples/transformers_trainer.py output
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, TrainingArguments, default_data_collator
from transformers.trainer_utils import get_last_checkpoint

from slipstream import Pipeline
from slipstream.extras.hf_trainer import SlipstreamTrainer


def counting(number: int, seed: int) -> list[dict[str, list[int]]]:
    """Returns sequences that continue by one from a random start."""
    starts = torch.randint(128, (number, 1), generator=torch.Generator().manual_seed(seed))
    rows = ((starts + torch.arange(256)) % 128).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def main(folder: str, num_steps: int = 20) -> None:
    """Learns to count; saves every ten steps, and goes on from the newest checkpoint in the folder."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=128,
        max_position_embeddings=256,
    )
    pipe = Pipeline.from_config(config, seed=0, schedule="1f1b", num_microbatches=2, slices=4)
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=num_steps,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SlipstreamTrainer(
        pipe,
        args,
        train_dataset=counting(40, seed=0),
        eval_dataset=counting(8, seed=1),
        data_collator=default_data_collator,
    )
    last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1])
