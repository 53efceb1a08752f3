"""A plugin for axolotl: the model of its YAML trains as a Pipeline over all processes, in token slices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers import Trainer

from slipstream.errors import SlipstreamError
from slipstream.extras.hf_trainer import SlipstreamTrainer
from slipstream.options import RECORDS, Memory
from slipstream.pipeline import Pipeline
from slipstream.train.config import precision_named

_LORA_KERNELS = ("lora_qkv_kernel", "lora_o_kernel", "lora_mlp_kernel", "lora_embedding_kernel")
# Settings of the YAML that a Pipeline can't do, and their remedies.
_REFUSED = {
    "rl": "train on preferences by `slipstream train` (preference.loss), or with TRL's data in a script of your own",
    "reward_model": "only causal LMs are trained",
    "process_reward_model": "only causal LMs are trained",
    "sample_packing": "give sample_packing: false; packed samples haven't been shown to be as axolotl has them",
    **dict.fromkeys(_LORA_KERNELS, "leave it out: it replaces the code of all models' layers"),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit"),
        "give bfloat16 weights, or train by `slipstream train` with lora.base_precision=nf4",
    ),
    "fsdp_config": "leave it out: the layers are spread over the processes",
    "deepspeed": "leave it out: the layers are spread over the processes",
    "context_parallel_size": "leave it out: the sequences are cut into slices",
    "tensor_parallel_size": "leave it out: the layers are spread over the processes",
    "fp16": "give bf16: true",
    "fp8": "give bf16: true",
    "orpo_alpha": "the loss is cross-entropy",
    "use_eaft": "the loss is cross-entropy",
    **dict.fromkeys(
        ("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale", "lr_groups"), "all weights have one learning rate"
    ),
    "activation_offloading": "leave it out, and give slipstream: {memory: {recompute: full, offload: 0.5}}",
    "layer_offloading": "leave it out: a process has its own layers alone",
    "relora": "no weights are merged as it trains",
    "lisa_n_layers": "the trained layers are the same all the time",
    "liger_rms_norm": "leave it out, or give slipstream: {runtime: {fused: true}}",
    "torch_compile": "leave it out, or give slipstream: {runtime: {fused: true}}",
}


class SlipstreamInput(BaseModel):
    """The settings that a YAML may have besides axolotl's."""

    slipstream: dict[str, Any] | None = None
    """Arguments of the Pipeline, such as `{slices: 8, schedule: zb-h1}`."""


class SlipstreamPlugin(BasePlugin):  # type: ignore[misc]
    """Trains the model that axolotl has loaded as a Pipeline, whose stages are the processes that it was launched with.

    One line of the YAML asks for it: `plugins: [slipstream.extras.axolotl_plugin.SlipstreamPlugin]`.
    """

    def register(self, cfg: dict[str, Any]) -> None:
        """Leaves out the kernels of adapters that axolotl would add by itself."""
        for name in _LORA_KERNELS:
            if cfg.get(name) is None:
                cfg[name] = False

    def get_input_args(self) -> str:
        """Returns where axolotl finds the settings that the plugin adds."""
        return f"{__name__}.{SlipstreamInput.__name__}"

    def get_trainer_cls(self, cfg: Mapping[str, Any]) -> type[Trainer]:
        """Returns a Trainer class whose model becomes a Pipeline.

        Raises SlipstreamError for settings of the YAML that a Pipeline can't do.
        """
        for name, instead in _REFUSED.items():
            value = cfg.get(name)
            if value and not (name.endswith("_size") and value == 1):
                raise SlipstreamError(f"{name}: {value} with SlipstreamPlugin: {instead}.")
        return type("AxolotlPipelineTrainer", (_PipelineTrainer,), {"options": pipeline_options(cfg)})


def pipeline_options(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the Pipeline's arguments that a YAML asks for."""
    section = dict(cfg.get("slipstream") or {})
    options = section | {name: record(**section[name]) for name, record in RECORDS.items() if name in section}
    if cfg.get("bf16") and "precision" not in options:
        options["precision"] = precision_named("bf16-weights")
    if cfg.get("gradient_checkpointing") and "memory" not in options:
        options["memory"] = Memory(recompute="full")
    return {"slices": 8} | options


class _PipelineTrainer(SlipstreamTrainer, AxolotlTrainer):  # type: ignore[misc]
    """A SlipstreamTrainer with the samplers, collators and logs of axolotl's."""

    options: Mapping[str, Any]

    def __init__(self, model: Any, args: Any, **others: Any) -> None:
        if int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)) < args.world_size:
            raise SlipstreamError(
                "SlipstreamPlugin on several nodes: axolotl saves the model of each node's first process, of which "
                "only one has all weights. Start it on one node, or train by `slipstream train`."
            )
        # The Pipeline's options say what these did.
        args.bf16 = args.bf16_full_eval = False
        if args.gradient_checkpointing:
            model.gradient_checkpointing_disable()
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        self._whole: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        super().__init__(Pipeline(model, device=args.device, **self.options), args, **others)

    def train(self, *args: Any, **options: Any) -> Any:
        """Trains, and then gives the model that axolotl has loaded, and will save, the weights of all ranks."""
        result = super().train(*args, **options)
        if state := self.pipe.state_dict():
            # A tied weight has a single name there.
            self._whole.load_state_dict(state, strict=False)
        return result
