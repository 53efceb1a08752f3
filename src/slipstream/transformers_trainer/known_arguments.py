"""Which of TrainingArguments a SlipstreamTrainer takes, and what to type in place of the others."""

from __future__ import annotations

_DTYPE = "Give Pipeline(precision=slipstream.Precision(dtype='bfloat16', master_dtype='float32'))"
_RECOMPUTE = "Give Pipeline(memory=slipstream.Memory(recompute='full')), or 'selective'"
_FUSED = "Give Pipeline(runtime=slipstream.Runtime(fused=True)), which compiles norms and activations"
_SHARDED = (
    "Give Pipeline(parallel=slipstream.Parallelism(shard_optimizer=True)), or shard_parameters=True, where there are "
    "replicas"
)
_NO_DDP = "Leave it out: a Pipeline sums gradients over replicas itself"
_LOSS = "Give Pipeline(loss_fn=...), a function that returns (sum, count)"

REFUSED = {
    "bf16": _DTYPE,
    "fp16": "Give Pipeline(precision=slipstream.Precision(dtype='bfloat16', master_dtype='float32')): a GradScaler "
    "can't scale a loss whose backward has run",
    "bf16_full_eval": f"{_DTYPE}: it is evaluated as it is trained",
    "fp16_full_eval": f"{_DTYPE}: it is evaluated as it is trained",
    "gradient_checkpointing": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "torch_compile": _FUSED,
    "use_liger_kernel": _FUSED,
    "use_cache": "Leave it out: no step reads the cache",
    "neftune_noise_alpha": "Leave it out: a Pipeline adds no noise to embeddings",
    "label_smoothing_factor": _LOSS,
    "torch_empty_cache_steps": "Leave it out, or call torch.cuda.empty_cache() in a callback's on_step_end",
    "auto_find_batch_size": "Give per_device_train_batch_size, and Pipeline(memory=slipstream.Memory(limit=...)), "
    "which measures before the first step what a rank holds",
    "eval_use_gather_object": "Leave it out: predictions are gathered as tensors",
    "save_on_each_node": "Leave it out, and give an output_dir on a disk that all ranks share",
    "enable_jit_checkpoint": "Give save_steps: a signal may reach the ranks in different steps",
    "parallelism_config": "Give Pipeline(mesh=slipstream.make_mesh(pp=..., dp=..., tp=...))",
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "debug": "Leave it out: it looks into modules that the ranks don't have as a whole",
}
"""What to do instead, by the argument's name; any value but false, none or zero is refused."""

ENVIRONMENT = {
    "ACCELERATE_DYNAMO_BACKEND": _FUSED,
    "ACCELERATE_MIXED_PRECISION": _DTYPE,
    "ACCELERATE_USE_FSDP": _SHARDED,
    "ACCELERATE_USE_DEEPSPEED": _SHARDED,
    "ACCELERATE_USE_MEGATRON_LM": "Leave it out: the layers are split by the Pipeline",
    "ACCELERATE_USE_PARALLELISM_CONFIG": REFUSED["parallelism_config"],
}
"""The same of what `accelerate launch` sets, by its flags and by its configuration; no and false are taken."""

_WITH_CONDITIONS = """
accelerator_config average_tokens_across_devices ddp_backend ddp_timeout label_names load_best_model_at_end optim
optim_args optim_target_modules save_only_model train_sampling_strategy use_cpu
"""  # some of their values are taken: see `argument_check`
_TAKEN = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps max_grad_norm tf32
logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen
log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only
eval_on_start eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics save_strategy
save_steps save_total_limit push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
hub_revision metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint
full_determinism seed data_seed dataloader_drop_last dataloader_num_workers dataloader_pin_memory
dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
remove_unused_columns length_column_name skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
local_rank
"""  # they do what they do in a Trainer
_DETAILS = """
activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode
liger_kernel_config fsdp_config
"""  # how to do what another argument asks for, which is refused
NOT_REFUSED = frozenset((_WITH_CONDITIONS + _TAKEN + _DETAILS).split())
"""The names of the other arguments."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd")
"""The optimizers by name that treat every parameter, or every element, by itself."""
