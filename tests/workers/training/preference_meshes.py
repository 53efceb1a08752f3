"""What each of two processes runs: a step of preferences; prints how far loss and gradients of it are off."""

from __future__ import annotations

import copy
import sys

import torch.distributed as dist

from slipstream import make_mesh
from slipstream.train.data import sequences_of
from slipstream.train.preferences import mean_rewards, preference_loss, reward_sums
from support.architectures import no_rounding_inside
from support.pipelines import make_pipe
from support.preference_pairs import NAME, SECTION, expected_of_dpo, pairs
from support.ragged_batches import MODELS
from workers.pipeline.ragged_meshes import error


def main() -> None:
    dist.init_process_group("gloo")
    loss, rewards, expected = expected_of_dpo()
    sequences = sequences_of([pairs()], "none", 24, seed=3)
    pipe = make_pipe(
        copy.deepcopy(MODELS[NAME]),
        slices=2,
        mesh=make_mesh(pp=1, **{sys.argv[1]: 2}),
        loss_fn=preference_loss(SECTION),
    )
    batch = sequences.batch(0, sequences.num_sequences, pipe.replica, pipe.num_replicas)
    assert batch.sequence_values is not None
    with no_rounding_inside():
        found = pipe.step(batch.input_ids, batch.labels, sequence_values=batch.sequence_values)
    measured = mean_rewards(reward_sums(pipe, batch.sequence_values, SECTION))
    off = [abs(measured[name] - rewards[name]) for name in rewards]
    print(max(error(pipe, expected), abs(float(found) - loss), *off), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
