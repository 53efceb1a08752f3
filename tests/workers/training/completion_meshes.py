"""What each process runs: on each mesh a step on its part of the samples; prints how far loss and gradients are off."""

from __future__ import annotations

import copy
import sys
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from slipstream import make_mesh
from slipstream.train.data import TokenisedText, sequences_of
from support.architectures import no_rounding_inside
from support.pipelines import make_pipe
from support.ragged_batches import MODELS, one_by_one
from workers.pipeline.ragged_meshes import error

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
    with no_rounding_inside():
        loss, expected = one_by_one(NAME, *rows)
    for mesh, packing in product(sys.argv[1:], ("fixed", "none")):
        sequences = sequences_of([text], packing, LENGTH, seed=3)
        axes = dict(zip(("pp", "dp", "tp"), map(int, mesh.split(",")), strict=True))
        pipe = make_pipe(
            copy.deepcopy(MODELS[NAME]),
            slices=[7, 1, 8] if packing == "fixed" else 2,
            num_microbatches=min(2, sequences.num_sequences // axes["dp"]),
            mesh=make_mesh(**axes),
        )
        batch = sequences.batch(0, sequences.num_sequences, pipe.replica, pipe.num_replicas)
        with no_rounding_inside():
            found = pipe.step(batch.input_ids, batch.labels, document_ids=batch.document_ids)
            held_out = pipe.evaluate(batch.input_ids, batch.labels, document_ids=batch.document_ids)
        off = (abs(float(each) - float(loss)) for each in (found, held_out))
        print(max(error(pipe, expected), *off), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
