"""What an nn.Sequential can't take: options of causal LMs, batches whose rows or targets don't fit its layers."""

from __future__ import annotations

from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.model import Tensors
from slipstream.model.sequential import LayerBoundary
from slipstream.pipeline.batch import check_rows
from slipstream.pipeline.pipeline_options import PipelineOptions, SequenceLoss


def check_options(model: nn.Sequential, options: PipelineOptions, tensor_ranks: int) -> None:
    """Raises SlipstreamError for options that an nn.Sequential doesn't have, and for a model without weights."""
    _check_options_of_causal_lms(options)
    if tensor_ranks > 1:
        raise SlipstreamError(
            f"an nn.Sequential on a mesh with tp={tensor_ranks}: nothing says how its layers could be shared. Use tp=1."
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise SlipstreamError("the nn.Sequential is on the meta device, so it has no weights. Build it in memory.")
    if options.memory.recompute == "segments" and options.memory.offload:
        raise SlipstreamError(
            f"memory.recompute='segments' with memory.offload={options.memory.offload}: leave one of the two out."
        )


def _check_options_of_causal_lms(options: PipelineOptions) -> None:
    theirs = "an option of causal LMs, but the model is an nn.Sequential."
    if options.seq_len is not None:
        raise SlipstreamError(f"seq_len={options.seq_len}: {theirs} Leave it out.")
    options.parallel.refuse(("sequence_parallel", "tensor_plan"), theirs)
    options.runtime.refuse(("fused",), theirs)
    options.memory.refuse(("limit",), "not for an nn.Sequential.")
    options.parallel.refuse(("shard_parameters",), "not for an nn.Sequential.")
    if options.router_loss != "none":
        raise SlipstreamError(f"router_loss={options.router_loss!r}: an option of causal LMs. Leave it out.")
    if options.vocabulary == "spread":
        raise SlipstreamError("vocabulary='spread': an nn.Sequential has no head that is known. Leave it out.")
    if isinstance(options.loss_fn, SequenceLoss):
        raise SlipstreamError("loss_fn=SequenceLoss(...): a loss of token sequences, for causal LMs. Leave it out.")
    if options.rates is not None:
        raise SlipstreamError("rates=...: of an nn.Sequential each sequence is a microbatch. Leave it out.")


def check_batch(inputs: Tensors, targets: Tensor, num_microbatches: int) -> None:
    """Raises SlipstreamError where not all tensors have the same rows, or these don't divide into microbatches."""
    named = [("targets", targets), *(("inputs", tensor) for tensor in inputs)]
    rows = inputs[0].shape[0] if inputs[0].dim() else 0
    for name, tensor in named:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise SlipstreamError(
                f"{name} of shape {tuple(tensor.shape)} for a batch of {rows} rows: dim 0 of every tensor is the batch."
            )
    check_rows(rows, num_microbatches, "rows")


def check_sliced_targets(targets: Tensor, length: int) -> None:
    """Raises SlipstreamError where targets (rows, `length`, ...) can't be cut into slices as the inputs are."""
    if targets.is_floating_point():
        raise SlipstreamError(
            f"targets of {targets.dtype} in token slices: such a loss is a mean over rows, and every slice has a part "
            "of each. Leave slices out."
        )
    if targets.dim() < 2 or targets.shape[1] != length:
        raise SlipstreamError(
            f"targets of shape {tuple(targets.shape)} for {length} tokens in slices: give (rows, {length}, ...)."
        )


def check_default_loss(outputs: LayerBoundary, targets: Tensor) -> None:
    """Raises SlipstreamError where the default loss isn't for these outputs and targets."""
    shapes = [tuple(spec.shape) for spec in outputs.specs]
    fits = not outputs.is_tuple and len(shapes[0]) > 1 and (shapes[0][0], *shapes[0][2:]) == tuple(targets.shape)
    if not fits or targets.is_floating_point():
        raise SlipstreamError(
            f"the sequence returns {' and '.join(map(str, shapes))} for targets of {tuple(targets.shape)} "
            f"{targets.dtype}, but the default loss is the cross-entropy of (rows, classes, ...) with class numbers "
            "(rows, ...). Give a loss_fn."
        )
