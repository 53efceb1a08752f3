"""Each process of test_adapters: two ranks of a pipeline, then two replicas, then with a sharded optimizer."""

from __future__ import annotations

import torch.distributed as dist

from slipstream.parallel import make_mesh
from support.adapters import SLICES, adapted, lora, whole_gradients
from support.architectures import BOUND, gradient_error, gradients, labels_of, no_rounding_inside, tokens
from support.pipelines import make_pipe

if __name__ == "__main__":
    dist.init_process_group("gloo")
    layers = {"all": None, "upper": [3]}
    for name, trained in layers.items():
        model = adapted(lora(layers_to_transform=trained))
        _, expected = whole_gradients(model)
        for axes, options in (({"pp": 2}, {}), ({"dp": 2}, {}), ({"dp": 2}, {"shard": "optimizer"})):
            pipe = make_pipe(
                adapted(lora(layers_to_transform=trained)), "zb-h1", slices=SLICES, mesh=make_mesh(**axes), **options
            )
            inputs, labels = tokens(), labels_of(tokens())
            mine = slice(pipe.replica, pipe.replica + 1) if "dp" in axes else slice(None)
            with no_rounding_inside():
                pipe.step(inputs[mine], labels[mine])
            found = gradients(pipe)
            if options:
                shards = {each.name: each for each in pipe.parameter_shards()}
                rows = {key: slice(shards[key].first_row, shards[key].first_row + len(found[key])) for key in found}
                own = {key: expected[key][rows[key]] for key in found if found[key].numel()}
            else:
                own = {key: expected[key] for key in found}
            assert not own or gradient_error(own, found) < BOUND, (name, axes)
            num_found = sum(pipe.axes["pp"].gather(len(found)))
            assert options or num_found == len(expected), (name, axes, num_found)
            assert float(pipe.clip_grad_norm_(1.0)) > 0
            print(f"exact: {name} {axes} {options}", flush=True)
    dist.destroy_process_group()
