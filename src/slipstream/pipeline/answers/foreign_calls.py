"""The answers to what other libraries, and habits, call on a model, and a Pipeline does otherwise."""

from __future__ import annotations

_PLACE = (
    "its parameters are where Pipeline(device=...) puts them, and of the dtype in precision=slipstream.Precision(dtype="
    "...). accelerate, which calls it, has a loop of its own: write yours around pipe.step(inputs, targets), or use "
    "`slipstream train`; for transformers' Trainer there is slipstream.transformers_trainer.SlipstreamTrainer"
)
_LAYERS = "its layers are spread over the ranks, and pipe.named_parameters() yields what this rank's optimizer updates"
_RECOMPUTE = "give Pipeline(memory=slipstream.Memory(recompute='full')), or 'selective'"
_FORWARD = (
    "call pipe.step(inputs, targets), which runs forward and backward and returns the loss, or pipe.evaluate(inputs, "
    "targets); for logits pipe.logits(inputs)"
)
_COMPILE = "for fused norms and activations give Pipeline(runtime=slipstream.Runtime(fused=True))"

ANSWERS = {
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type"), _PLACE),
    **dict.fromkeys(("modules", "named_modules", "children"), _LAYERS),
    **dict.fromkeys(("gradient_checkpointing_enable", "activation_checkpointing_enable"), _RECOMPUTE),
    **dict.fromkeys(("forward", "__call__"), _FORWARD),
    **dict.fromkeys(("compile", "_compiled_call_impl"), _COMPILE),
    "backward": "pipe.step has already run the backward, and its gradients are in .grad",
    "zero_grad": "call optimizer.zero_grad()",
    "no_sync": "to add up the gradients of several batches, call pipe.step for each before optimizer.step()",
    "generate": "save_pretrained(folder), and let AutoModelForCausalLM.from_pretrained(folder) generate",
    "load_state_dict": "start with Pipeline.from_pretrained(folder), or from a model with these weights; "
    "pipe.load(folder) loads what pipe.save saved",
}
"""What to type instead, by the attribute's name."""
