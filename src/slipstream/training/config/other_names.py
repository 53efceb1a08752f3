"""What other libraries call settings and their values: of these a message says what is meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_NAMES: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "warmup": "optimizer.warmup_steps",
    "max_grad_norm": "optimizer.clip_norm",
    "grad_clip": "optimizer.clip_norm",
    "max_steps": "training.steps",
    "num_steps": "training.steps",
    "num_epochs": "training.epochs",
    "num_train_epochs": "training.epochs",
    "global_batch_size": "training.batch_size",
    "train_batch_size": "training.batch_size",
    "per_device_train_batch_size": "training.batch_size",
    "gradient_accumulation_steps": "pipeline.num_microbatches",
    "max_seq_length": "training.seq_len",
    "sequence_length": "training.seq_len",
    "context_length": "training.seq_len",
    "output_dir": "training.output",
    "dtype": "training.precision",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "eval_steps": "training.eval_every",
    "save_steps": "checkpoint.every",
    "early_stopping_patience": "training.patience",
    "save_best": "checkpoint.keep_best",
    "load_best_model_at_end": "training.export",
    "resume_from_checkpoint": "checkpoint.resume",
    "report_to": "tracking.to",
    "model_name_or_path": "model.path",
    "num_stages": "pipeline.num_ranks",
    "tensor_parallel": "parallel.tensor",
    "data_parallel": "parallel.data",
    "gradient_checkpointing": "memory.recompute",
    "rank": "lora.r",
    "lora_alpha": "lora.alpha",
}
"""The setting that is meant by another name: by its last part, whatever section was typed."""

OTHER_VALUES: Mapping[str, Mapping[Any, str]] = {
    "training.precision": {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "mixed": "bf16",
        "fp32": "float32",
        "32": "float32",
        32: "float32",
        16: "bf16",
    },
    "training.device": {"gpu": "cuda", "cuda:0": "cuda"},
    "memory.recompute": {True: "full", False: "none"},
    "checkpoint.resume": {True: "latest", False: "no", "auto": "latest"},
    "training.export": {True: "best", False: "last"},
    "data.packing": {True: "fixed", False: "none"},
    "data.corpus": {"python": "python-stdlib"},
    "pipeline.vocabulary": {True: "spread", False: "whole"},
}
"""The value of a setting that is meant by another one, which is in lower case."""
