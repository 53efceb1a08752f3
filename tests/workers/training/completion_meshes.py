"""What each of two replicas runs: a step on its half of the samples; prints how far loss and gradients are off."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.distributed as dist

from slipstream import Pipeline, Runtime, make_mesh
from slipstream.training.data import TokenisedText, sequences_of
from support.architectures import gradient_error, gradients
from support.ragged_batches import MODELS, one_by_one

NAME, LENGTH = "llama, tied", 16


def main() -> None:
    dist.init_process_group("gloo")
    random = np.random.default_rng(1)
    tokens = [random.integers(1, 61, length).astype(np.int32) for length in (16, 9, 14, 5, 12, 16, 10, 4)]
    labels = [
        np.where(np.arange(len(each)) < min(3 * n, len(each) - 1), -100, each).astype(np.int32)
        for n, each in enumerate(tokens)
    ]
    text = TokenisedText.join(tokens, labels)
    rows = [[torch.from_numpy(each.astype(np.int64)) for each in column] for column in (tokens, labels)]
    loss, expected = one_by_one(NAME, *rows)
    for packing in ("fixed", "none"):
        sequences = sequences_of([text], packing, LENGTH, seed=3)
        pipe = Pipeline(
            copy.deepcopy(MODELS[NAME]), slices=2, mesh=make_mesh(pp=1, dp=2), runtime=Runtime(self_check=False)
        )
        batch = sequences.batch(0, sequences.num_sequences, pipe.replica, pipe.num_replicas)
        found = pipe.step(batch.input_ids, batch.labels, document_ids=batch.document_ids)
        error = gradient_error(expected, gradients(pipe.named_parameters()))
        print(max(error, abs(float(found) - float(loss))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
