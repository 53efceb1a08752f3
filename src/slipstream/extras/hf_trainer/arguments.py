"""Finds arguments of a Trainer that a Pipeline would ignore or treat otherwise, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.utils import DynamoBackend
from torch.optim import Optimizer
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from slipstream.errors import SlipstreamError
from slipstream.pipeline import Pipeline

_SAMPLING = ("random", "sequential", "group_by_length")
_INSTEAD = {
    "model_init": "give a Pipeline: slipstream.Pipeline.from_config(config, seed=...) draws the weights",
    "compute_loss_func": "give Pipeline(loss_fn=...), a function that returns (sum, count)",
}


def check_script(model: object, given: Mapping[str, Any]) -> None:
    """Raises SlipstreamError for a model that isn't a Pipeline of a causal LM, and for functions of the script that
    would never be called."""
    for name, instead in _INSTEAD.items():
        if given.get(name) is not None:
            raise SlipstreamError(f"{name}=... in a SlipstreamTrainer: {instead}.")
    if not isinstance(model, Pipeline):
        raise SlipstreamError(
            f"a SlipstreamTrainer trains a Pipeline, and model= is a {type(model).__name__}: give "
            "slipstream.Pipeline.from_pretrained(folder or name, slices=8), or slipstream.Pipeline(model, slices=8)."
        )
    # An nn.Sequential has no config and raises here.
    _ = model.config
    if given.get("compute_metrics") is not None and model.layout.spreads_vocabulary:
        raise SlipstreamError(
            "compute_metrics=... needs the logits of all tokens, and no rank has them, as the rows of the head are "
            "spread over the ranks: give Pipeline(vocabulary='whole'), or leave compute_metrics out."
        )
    chosen = given.get("optimizer_cls_and_kwargs")
    if chosen is not None and not (isinstance(chosen[0], type) and issubclass(chosen[0], Optimizer)):
        raise SlipstreamError(
            "optimizer_cls_and_kwargs has something that makes optimizers of the whole model's modules: give a "
            "subclass of torch.optim.Optimizer, or optimizers=(optimizer of pipe.parameters(), None)."
        )


def check_arguments(args: TrainingArguments, pipe: Pipeline, optimizer: Optimizer | None) -> None:
    """Raises SlipstreamError, with all that is wrong, for arguments that would be ignored."""
    problems = [*_of_launcher(), *_refused(args, pipe), *_unknown(args)]
    problems += [*_in_part(args, pipe), *_of_processes(args, pipe)]
    if optimizer is None:
        problems += _of_optimizer(args, pipe)
    else:
        pipeline_ids = {id(parameter) for parameter in pipe.parameters()}
        if any(id(parameter) not in pipeline_ids for group in optimizer.param_groups for parameter in group["params"]):
            problems.append("optimizers=...: make the optimizer of pipe.parameters(), after the Pipeline.")
    if problems:
        raise SlipstreamError("\n".join(problems))


_LIBRARIES = ("trl", "transformers")
_OF_LOSS = (
    "beta",
    "loss_type",
    "loss_weights",
    "label_smoothing",
    "desirable_weight",
    "undesirable_weight",
    "ld_alpha",
)


def check_derived(args: TrainingArguments) -> None:
    """Raises SlipstreamError for arguments of a class of TRL or transformers that only its own trainer reads, such as
    those of SFTConfig that say how data is prepared, and of DPOConfig that say which loss it is."""
    derived = [kind for kind in type(args).__mro__ if kind.__module__.partition(".")[0] in _LIBRARIES]
    names = {
        name for kind in derived if kind is not TrainingArguments for name in vars(kind).get("__annotations__", {})
    }
    names -= {field.name for field in fields(TrainingArguments)}
    problems = []
    for field in fields(args):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(args, field.name)
        if field.name not in names or value in (None, False) or value == default:
            continue
        instead = "give the train_dataset and the data_collator of a TRL trainer that is made with it"
        if field.name in _OF_LOSS:
            instead = (
                "give Pipeline(loss_fn=slipstream.train.preferences.preference_loss("
                "slipstream.train.config.PreferenceSection(...))), or another loss_fn"
            )
        elif not type(args).__module__.startswith("trl"):
            instead = "give transformers.TrainingArguments"
        problems.append(
            f"{field.name}={value!r} of {type(args).__name__}, which a SlipstreamTrainer doesn't read: {instead}, and "
            f"leave {field.name} out here."
        )
    if problems:
        raise SlipstreamError("\n".join(problems))


def check_batches(pipe: Pipeline, dataset: Any, args: TrainingArguments) -> None:
    """Raises SlipstreamError where a last, smaller batch would have to be filled up with rows that weigh in the balance
    of a mixture of experts or in a mean over sequences, and where several batches would add up to such a mean."""
    num_microbatches = pipe.order.num_microbatches
    rows = args.per_device_train_batch_size
    if rows < num_microbatches:
        raise SlipstreamError(
            f"per_device_train_batch_size={rows}, which a step cuts into num_microbatches={num_microbatches}: give at "
            f"least {num_microbatches} rows, or fewer microbatches."
        )
    if (accumulated := args.gradient_accumulation_steps) > 1 and pipe.has_sequence_loss:
        raise SlipstreamError(
            f"gradient_accumulation_steps={accumulated} with a SequenceLoss, which is a mean over the sequences of one "
            f"step: give per_device_train_batch_size={rows * accumulated}, and "
            f"Pipeline(num_microbatches={num_microbatches * accumulated}) for as much memory."
        )
    if pipe.has_sequence_loss:
        what = "a loss of whole sequences"
    elif hasattr(pipe.config, "router_aux_loss_coef"):
        what = "a mixture of experts"
    else:
        return
    if args.dataloader_drop_last:
        return
    is_known = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    if is_known and pipe.num_replicas > 1:
        if len(dataset) % (rows * pipe.num_replicas):
            raise SlipstreamError(
                f"{len(dataset)} rows don't fill batches of {rows} on {pipe.num_replicas} replicas, and the last batch "
                f"of {what} can't be filled up with repeated ones: give dataloader_drop_last=True."
            )
    elif not is_known or 0 < len(dataset) % rows < num_microbatches:
        raise SlipstreamError(
            f"the last batch of {what} may have fewer rows than num_microbatches={num_microbatches}: "
            "give dataloader_drop_last=True."
        )


def check_evaluated(pipe: Pipeline, dataset: Any, args: TrainingArguments) -> None:
    """Raises SlipstreamError where replicas would evaluate rows that are repeated to fill the last batch, and these
    can't be told from others, or be left out of the loss."""
    if pipe.num_replicas == 1:
        return
    if isinstance(dataset, IterableDataset):
        raise SlipstreamError(
            f"evaluation of a data set without a length on {pipe.num_replicas} replicas, whose last batch is filled up "
            "with rows that would count twice: give one with a length, such as datasets.Dataset.from_list([*rows])."
        )
    rows = args.per_device_eval_batch_size * pipe.num_replicas
    if pipe.has_sequence_loss and len(dataset) % rows and not args.dataloader_drop_last:
        raise SlipstreamError(
            f"evaluation of {len(dataset)} rows by a loss of whole sequences, on {pipe.num_replicas} replicas with "
            f"per_device_eval_batch_size={args.per_device_eval_batch_size}: the last batch would be filled up with "
            f"rows that count twice. Give a multiple of {rows} rows."
        )


def check_accelerator(accelerator: Accelerator) -> None:
    """Raises SlipstreamError for settings by which an Accelerator would change the model or gradients, however it got
    them: all of a process have one state, also one that the script has made before."""
    state = accelerator.state
    plain = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    dynamo = state.dynamo_plugin.backend
    problems = {
        f"mixed precision {accelerator.mixed_precision}": accelerator.mixed_precision != "no",
        f"TorchDynamo's backend {dynamo.value}": dynamo != DynamoBackend.NO,
        f"distributed training by {accelerator.distributed_type.value}": accelerator.distributed_type not in plain,
        "a parallelism_config": getattr(accelerator, "parallelism_config", None) is not None,
    }
    if named := [name for name, is_wrong in problems.items() if is_wrong]:
        raise SlipstreamError(
            f"the Accelerator of this process has {', '.join(named)}: give none to accelerate.Accelerator(...), where "
            "the script makes one, nor to accelerate launch. A Pipeline has precision=..., parallel=... and "
            "runtime=slipstream.Runtime(fused=True)."
        )


def _of_launcher() -> Iterator[str]:
    """Yields the refusals of settings that a launcher has put into the environment."""
    for name, instead in ENVIRONMENT.items():
        value = os.environ.get(name, "")
        if value.lower() not in ("", "no", "false", "0", "off", "n", "f"):
            yield (
                f"{name}={value} in a SlipstreamTrainer, set by accelerate launch or its configuration: switch it off "
                f"there. {instead}."
            )


def _refused(args: TrainingArguments, pipe: Pipeline) -> Iterator[str]:
    done = ("gradient_checkpointing", "activation_checkpointing") if pipe.layout.recompute is not None else ()
    for name, instead in REFUSED.items():
        if (value := getattr(args, name, None)) and name not in done:
            yield f"{name}={value!r} in a SlipstreamTrainer: {instead[0].lower()}{instead[1:]}."


def _unknown(args: TrainingArguments) -> Iterator[str]:
    """Yields the refusals of arguments that only a later version of transformers has, where they are given."""
    known = NOT_REFUSED | REFUSED.keys()
    for field in fields(TrainingArguments):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in known and getattr(args, field.name) != default:
            yield f"{field.name}={getattr(args, field.name)!r}: a SlipstreamTrainer doesn't know it. Leave it out."


def _in_part(args: TrainingArguments, pipe: Pipeline) -> Iterator[str]:
    """Yields the refusals of values that aren't taken."""
    loader = args.accelerator_config
    if loader.dispatch_batches:
        yield "accelerator_config.dispatch_batches=True: leave it out, every rank reads its replica's batches."
    if pipe.num_replicas > 1 and not loader.even_batches:
        yield "accelerator_config.even_batches=False: leave it out, all replicas run the same number of steps."
    if pipe.num_replicas > 1 and not args.average_tokens_across_devices:
        yield "average_tokens_across_devices=False: leave it out, the loss is the mean over all replicas' labels."
    if args.label_names not in (None, ["labels"]):
        yield f"label_names={args.label_names!r}: leave it out, a causal LM's labels are called 'labels'."
    if args.load_best_model_at_end and args.save_only_model:
        yield "load_best_model_at_end=True with save_only_model=True: give one of the two."
    if args.train_sampling_strategy not in _SAMPLING:
        yield f"train_sampling_strategy={args.train_sampling_strategy!r}: give one of {', '.join(_SAMPLING)}."


def _of_processes(args: TrainingArguments, pipe: Pipeline) -> Iterator[str]:
    # "cpu:0" equals "cpu" in this form.
    if torch.empty(0, device=args.device).device != torch.empty(0, device=pipe.device).device:
        yield (
            f"the Trainer's device is {args.device}, the Pipeline's {pipe.device}: give Pipeline(device="
            f"{str(args.device)!r}), or TrainingArguments(use_cpu=True) for a Pipeline on the CPU."
        )
    if args.n_gpu > 1:
        yield (
            f"{args.n_gpu} GPUs in one process: start the script with torchrun --nproc-per-node={args.n_gpu}, or with "
            "CUDA_VISIBLE_DEVICES=0."
        )
    if args.ddp_timeout != 1800:
        yield f"ddp_timeout={args.ddp_timeout}: give Pipeline(runtime=slipstream.Runtime(stall_limit=...))."
    processes = pipe.num_processes
    if args.world_size != processes:
        # With this device accelerate knows of one process only.
        on_cpu = pipe.device.type == "cpu" and not args.use_cpu
        instead = "TrainingArguments(use_cpu=True)" if on_cpu else "a mesh of all processes"
        yield f"processes of the Trainer: {args.world_size}, of the Pipeline's mesh: {processes}. Give {instead}."
    backend = dist.get_backend() if dist.is_initialized() else None
    if args.ddp_backend is not None and args.ddp_backend != backend:
        yield (
            f"ddp_backend={args.ddp_backend!r}, and the process group has {backend}: leave it out, or call "
            "torch.distributed.init_process_group(...) before the Pipeline is made."
        )


def _of_optimizer(args: TrainingArguments, pipe: Pipeline) -> Iterator[str]:
    if args.optim not in OPTIMIZERS:
        yield (
            f"optim={args.optim!r}: give one of {', '.join(OPTIMIZERS)}, or optimizers=(optimizer of "
            "pipe.parameters(), None)."
        )
    if args.optim == "adafactor" and not all(shard.is_whole for shard in pipe.parameter_shards()):
        yield "optim='adafactor' where a rank has a part of a matrix: give adamw_torch, or a mesh without it."


_DTYPE = "Give Pipeline(precision=slipstream.Precision(dtype='bfloat16', master_dtype='float32'))"
_RECOMPUTE = "Give Pipeline(memory=slipstream.Memory(recompute='full')), or 'selective'"
_FUSED = "Give Pipeline(runtime=slipstream.Runtime(fused=True)), which compiles norms and activations"
_SHARDED = (
    "Give Pipeline(parallel=slipstream.Parallelism(shard='optimizer')), or shard='parameters', where there are replicas"
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
    "neftune_noise_alpha": "Leave it out, and call pipe.add_embedding_noise(alpha, length) before the Trainer is made",
    "label_smoothing_factor": _LOSS,
    "torch_empty_cache_steps": "Leave it out, or call torch.cuda.empty_cache() in a callback's on_step_end",
    "auto_find_batch_size": "Give per_device_train_batch_size, and Pipeline(memory=slipstream.Memory(limit=...)), "
    "which measures before the first step what a rank holds",
    "eval_use_gather_object": "Leave it out: predictions are gathered as tensors",
    "save_on_each_node": "Leave it out, and give an output_dir on a disk that all ranks share",
    "enable_jit_checkpoint": "Give save_steps: a signal may reach the ranks in different steps",
    "parallelism_config": "Give Pipeline(mesh=slipstream.make_mesh(...))",
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "debug": "Leave it out: it looks into modules that the ranks don't have as a whole",
}
"""What to do instead, by the argument's name; any value but false, none or zero is refused; checkpointing only
where the Pipeline recomputes nothing."""

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
"""  # arguments with some accepted values, see `argument_check`
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
"""  # arguments with the same effect as in a Trainer
_DETAILS = """
activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode
liger_kernel_config fsdp_config
"""  # details of other arguments, which are refused or have no effect here
NOT_REFUSED = frozenset((_WITH_CONDITIONS + _TAKEN + _DETAILS).split())
"""The names of the other arguments."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd")
"""The names of optimizers that treat every parameter, or every element, by itself."""
