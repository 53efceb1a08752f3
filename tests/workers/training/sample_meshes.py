"""What each process runs: on each mesh a step on its part of samples or pairs of answers; prints how far it is off.

sample_meshes.py KIND:PP,DP,TP,CP ...    where KIND is fixed or none, the packing of samples, or pairs
"""

from __future__ import annotations

import copy
import sys
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream import make_mesh
from slipstream.train.data import TokenisedText, sequences_of
from slipstream.train.preferences import mean_rewards, preference_loss, reward_sums
from support.architectures import no_rounding_inside
from support.pipelines import make_pipe
from support.preference_pairs import NAME, SECTION, expected_of_dpo, pairs
from support.ragged_batches import MODELS, one_by_one
from workers.pipeline.ragged_meshes import error


@cache
def samples() -> tuple[TokenisedText, float, Any]:
    """Samples of which unequally many tokens count, and their loss and gradients, each alone."""
    random = np.random.default_rng(1)
    tokens = [random.integers(1, 61, length).astype(np.int32) for length in (16, 9, 14, 5, 12, 16, 10, 4)]
    labels = [
        np.where(np.arange(len(each)) < min(3 * n, len(each) - 1), -100, each).astype(np.int32)
        for n, each in enumerate(tokens)
    ]
    rows = [[torch.from_numpy(each.astype(np.int64)) for each in column] for column in (tokens, labels)]
    with no_rounding_inside():
        loss, gradients = one_by_one(NAME, *rows)
    return TokenisedText.join(tokens, labels), float(loss), gradients


def off(kind: str, axes: dict[str, int]) -> float:
    """The largest error of loss, gradients, and what an evaluation or the rewards say."""
    if kind == "pairs":
        text, (loss, rewards, expected) = pairs(), expected_of_dpo()
        sequences = sequences_of([text], "none", 24, seed=3)
        settings: dict[str, Any] = {"slices": 2, "loss_fn": preference_loss(SECTION)}
    else:
        text, loss, expected = samples()
        sequences = sequences_of([text], kind, 16, seed=3)
        settings = {"slices": [7, 1, 8] if kind == "fixed" else 2}
        settings["num_microbatches"] = min(2, sequences.num_sequences // axes["dp"])
    pipe = make_pipe(copy.deepcopy(MODELS[NAME]), mesh=make_mesh(**axes), **settings)
    batch = sequences.batch(0, sequences.num_sequences, pipe.replica, pipe.num_replicas)
    given = {"document_ids": batch.document_ids, "sequence_values": batch.sequence_values}
    with no_rounding_inside():
        errors = [abs(float(pipe.step(batch.input_ids, batch.labels, **given)) - loss), error(pipe, expected)]
        if batch.sequence_values is None:
            errors.append(abs(float(pipe.evaluate(batch.input_ids, batch.labels, **given)) - loss))
        else:
            measured = mean_rewards(reward_sums(pipe, batch.sequence_values, SECTION))
            errors += [abs(measured[name] - rewards[name]) for name in rewards]
    return max(errors)


def main() -> None:
    dist.init_process_group("gloo")
    for words in sys.argv[1:]:
        kind, _, sizes = words.partition(":")
        print(off(kind, dict(zip(("pp", "dp", "tp", "cp"), map(int, sizes.split(",")), strict=True))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
