"""What each process of a mesh with context parallelism runs: slices that ranks share train as one process does."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle, product
from math import lcm
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BloomConfig, DeepseekV3Config, LlamaConfig, PretrainedConfig, PreTrainedModel

from slipstream import Pipeline, SequenceLoss, SlipstreamError, make_mesh
from slipstream.cost import MeasuredCosts, profile_behind
from slipstream.model import causal_cross_entropy
from slipstream.parallel import RankGroup
from slipstream.pipeline.execution import step_graphs
from support import mixtures
from support.adapters import adapted, lora, pipe_error, whole_gradients
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    VOCABULARY,
    build,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.exact_steps import document_ids, steps_alone
from support.hybrids import HYBRIDS
from support.mixtures import mixture
from support.parallel.group_cases import by_name, run_cases
from support.parallel.shared_models import CONFIGS
from support.pipelines import make_pipe
from support.preferences import log_probabilities, preference, references
from support.recorded_ops import RecordedOps
from support.weighted_labels import unsplit_weighted_step, weighted_step
from workers.parallel.exactness import error

SLICES = [5, 20, 1, 38]  # of one token some rank has none
FOUR = {"pp2 cp2": {"pp": 2, "cp": 2}, "cp4": {"cp": 4}, "cp2 tp2": {"cp": 2, "tp": 2}, "dp2 cp2": {"dp": 2, "cp": 2}}
KINDS = ("heads", "keys")  # what is exchanged around attention
MODELS = ("llama, tied", "qwen3", "gemma3", "gpt_oss", "gpt2")

_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2}
_LATENT = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
OWN: dict[str, PretrainedConfig] = {
    "llama of 3 heads": LlamaConfig(**_SMALL, num_attention_heads=3, num_key_value_heads=1, head_dim=8),
    "llama of one key head": LlamaConfig(**_SMALL, num_attention_heads=4, num_key_value_heads=1, head_dim=8),
    "llama of six and three heads": LlamaConfig(**_SMALL, num_attention_heads=6, num_key_value_heads=3, head_dim=8),
    "keys wider than values": DeepseekV3Config(
        **_SMALL, **_LATENT, num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=2
    ),
}


def model_of(name: str) -> PreTrainedModel:
    return build(OWN.get(name) or CONFIGS.get(name) or HYBRIDS.get(name) or ARCHITECTURES[name], seed=3)


def gradients_of(whole: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def rows(name: str, mesh: dict[str, Any], **settings: Any) -> Pipeline:
    """A step on rows, an evaluation and the norm are one process's."""
    device = mesh.get("device_type", "cpu")
    whole, num_rows = model_of(name).to(device), 2 * mesh.get("dp", 1)
    inputs, labels = tokens(num_rows).to(device), labels_of(tokens(num_rows)).to(device)
    settings = {"slices": SLICES, "num_microbatches": 2, "device": device} | settings
    pipe = make_pipe(model_of(name), mesh=make_mesh(**mesh), **settings)
    mine = slice(2 * pipe.replica, 2 * pipe.replica + 2)
    with no_rounding_inside():
        expected = float(unsplit_step(whole, inputs, labels))
        for run in (pipe.step, pipe.evaluate):
            assert abs(float(run(inputs[mine], labels[mine])) - expected) < BOUND * expected
    found = error(pipe, gradients_of(whole), "grad")
    assert found < BOUND, (name, mesh, settings, found)
    norm = float(torch.nn.utils.get_total_norm(gradients_of(whole).values()))
    assert abs(float(pipe.clip_grad_norm_(torch.inf)) - norm) < BOUND * norm
    return pipe


def planned() -> None:
    """What ranks that share slices cost is measured together, and a plan is made by it before the first step."""
    open_ = {"schedule": "auto", "slices": "auto", "num_microbatches": 1, "seq_len": 64}
    pipe = rows("llama", {"cp": 2}, num_ranks=2, **open_)
    assert pipe.plan is not None
    profile, group = profile_behind(pipe.plan.costs), pipe.axes["cp"]
    assert (profile.degrees.context, profile.hardware.processes) == (group.size, dist.get_world_size())
    costs = MeasuredCosts(profile)
    assert costs.message_bytes(7) == -(-7 // group.size) * costs.message_bytes(1)


def indivisible(mesh: dict[str, int]) -> None:
    """Ranks that don't divide the query heads each keep all keys, by themselves."""
    rows("llama of 3 heads", mesh)
    with pytest.raises(SlipstreamError, match=r"3 query heads can't.*or give parallel\.context_exchange=keys"):
        make_pipe(OWN["llama of 3 heads"], mesh=make_mesh(**mesh), seed=0, context_exchange="heads")


def documents(name: str, mesh: dict[str, int], **settings: Any) -> None:
    """Packed documents, which end inside of ranks' parts of slices, are each as if alone."""
    lengths, whole, inputs = [(29, 21, 14), (40, 3, 21)], model_of(name), tokens()
    with no_rounding_inside():
        steps_alone(whole, [part for row, cut in zip(inputs, lengths, strict=True) for part in row.split(cut)])
        pipe = make_pipe(model_of(name), mesh=make_mesh(**mesh), **{"slices": SLICES} | settings)
        pipe.step(inputs, inputs, document_ids=document_ids(*lengths))
    found = error(pipe, gradients_of(whole), "grad")
    assert found < BOUND, (name, mesh, settings, found)


def sequences(name: str, mesh: dict[str, int], **settings: Any) -> None:
    """Sequences of different lengths, packed by the step itself, are each as if alone."""
    every = tokens(5)
    given = [row[:length] for row, length in zip(every, (50, 7, 33, 2, 18), strict=True)]
    whole = model_of(name)
    with no_rounding_inside():
        steps_alone(whole, given)
        pipe = make_pipe(model_of(name), mesh=make_mesh(**mesh), **{"slices": 3, "num_microbatches": 2} | settings)
        pipe.step(given, given)
    found = error(pipe, gradients_of(whole), "grad")
    assert found < BOUND, (name, mesh, settings, found)


def pairs() -> None:
    """A loss of whole sequences, of which every rank has some tokens, and their log-probabilities."""
    whole, inputs = model_of("llama"), tokens(4)
    labels, reference = labels_of(inputs), references(4)
    with no_rounding_inside():
        wanted = log_probabilities(whole, inputs, labels)
        expected = preference(wanted, reference).mean()
        expected.backward()
        loss_fn = SequenceLoss(preference, group_size=2)
        pipe = make_pipe(model_of("llama"), mesh=make_mesh(cp=2), slices=SLICES, num_microbatches=2, loss_fn=loss_fn)
        loss = pipe.step(inputs, labels, sequence_values=reference)
    assert abs(loss - expected) < BOUND * abs(expected)
    assert error(pipe, gradients_of(whole), "grad") < BOUND
    assert torch.allclose(pipe.sequence_log_probabilities(), wanted.double(), rtol=1e-10)


def values() -> None:
    """What travels with labels goes to the rank that has the prediction of each."""
    whole, inputs = model_of("llama"), tokens(4)
    advantages = torch.rand(inputs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with no_rounding_inside():
        expected = unsplit_weighted_step(whole, [*inputs], [*advantages])
        pipe = make_pipe(model_of("llama"), mesh=make_mesh(cp=2), slices=SLICES, num_microbatches=2)
        loss = weighted_step(pipe, inputs, advantages)
    assert abs(loss - expected) < BOUND * abs(expected)
    assert error(pipe, gradients_of(whole), "grad") < BOUND


def routers() -> None:
    """The load-balancing loss of a layer is of the choices and chances of all ranks' tokens."""
    whole, inputs = mixture("qwen2_moe, a dense layer"), tokens(4)
    labels = labels_of(inputs)
    mixtures.unsplit_step(whole, [(inputs[:2], labels[:2]), (inputs[2:], labels[2:])])
    for again in ("none", "full"):
        pipe = make_pipe(
            mixture("qwen2_moe, a dense layer"),
            mesh=make_mesh(cp=2),
            slices=SLICES,
            num_microbatches=2,
            router_loss="per_layer",
            recompute=again,
        )
        pipe.step(inputs, labels)
        assert error(pipe, gradients_of(whole), "grad") < 1e-7, again  # routers round to float32


def what_it_says() -> None:
    """Every rank with the last stage has the logits of all tokens, and log-probabilities are on all."""
    whole, inputs = model_of("gemma3"), tokens()
    with no_rounding_inside(), torch.no_grad():
        wanted = whole(input_ids=inputs, use_cache=False).logits
        pipe = make_pipe(model_of("gemma3"), mesh=make_mesh(cp=2), slices=SLICES)
        found = pipe.logits(inputs)
        assert isinstance(found, Tensor)
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() < BOUND * wanted.abs().max()
        each = pipe.log_probabilities(inputs, inputs)
        assert isinstance(each, Tensor)
        assert torch.allclose(each.sum(1), log_probabilities(whole, inputs, inputs).double(), rtol=1e-10)
        pipe = make_pipe(model_of("gemma3"), mesh=make_mesh(cp=2), slices=5, num_microbatches=1)
        rows = [inputs[0, :41], inputs[1, :6]]
        for own, row in zip(pipe.logits(rows) or (), rows, strict=True):
            alone = whole(input_ids=row[None], use_cache=False).logits[0]
            assert (own - alone).abs().max() < BOUND * alone.abs().max()


def apart() -> None:
    """Another token in the first of two documents changes no logit of the second, which begins inside of the first
    rank's part of a slice, or of the second's."""
    inputs = tokens(1)
    changed = inputs.clone()
    changed[0, 11] = inputs[0, 11] % 60 + 1
    for name, kind in (("llama", "heads"), ("gemma3", "keys"), ("gpt_oss", "heads"), ("gpt_oss", "keys")):
        pipe = make_pipe(model_of(name), mesh=make_mesh(cp=2), slices=SLICES, context_exchange=kind)
        for end in (29, 50):  # of tokens 26 to 63 the ranks have 19 each
            ids = document_ids((end, 64 - end))
            before, after = (pipe.logits(each, document_ids=ids) for each in (inputs, changed))
            assert isinstance(before, Tensor)
            assert isinstance(after, Tensor)
            assert torch.equal(before[:, end:], after[:, end:]), (name, kind, end)
            assert not torch.equal(before[:, 11:end], after[:, 11:end]), (name, kind, end)


def adapters() -> None:
    """LoRA on attention and on the weights of experts, which see some of a slice's tokens on every rank."""
    config = lora(
        target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    model = adapted(config, "mixtral")
    _, expected = whole_gradients(model)
    for kind in KINDS:
        pipe = make_pipe(copy.deepcopy(model), mesh=make_mesh(cp=2), slices=SLICES, context_exchange=kind)
        assert pipe_error(pipe, expected) < BOUND, kind


def exchanged_bytes() -> None:
    """A rank receives (g-1)/g (n/g) (2 Hq + 2 lcm(Hkv, g)) d b bytes for a layer, row and slice, backward as many, and
    where keys are wider than values each counts as wide as it is; the context takes 1/gcd(g, Hkv) of the memory."""
    g = dist.get_world_size()
    for name in ("llama", "llama, as many keys as queries", *list(OWN)[1:]):
        config, inputs = OWN.get(name) or CONFIGS[name], tokens()
        pipe = make_pipe(model_of(name), mesh=make_mesh(cp=g), slices=4, context_exchange="heads")
        group = pipe.axes["cp"]
        before = group.payload["all_to_all"], group.calls["all_to_all"]
        pipe.evaluate(inputs, inputs)
        forward = group.payload["all_to_all"] - before[0]
        pipe.step(inputs, inputs)
        both = group.payload["all_to_all"] - before[0] - forward
        heads = config.num_attention_heads + lcm(config.num_key_value_heads, g)
        width = 18 if isinstance(config, DeepseekV3Config) else 2 * config.head_dim  # of a key and a value
        own = 64 // 4 // g  # tokens of a slice
        slices = 4 * config.num_hidden_layers * len(inputs)
        assert forward * g == (g - 1) * own * heads * width * 8 * slices, (name, forward)
        assert both == 2 * forward
        assert group.calls["all_to_all"] - before[1] == 3 * 2 * 4 * config.num_hidden_layers


def gathered_bytes() -> None:
    """A rank receives (g-1)/g n 2 Hkv d b bytes of keys and values, and as many of sums in the accumulation dtype,
    which are wider than b where that is 2; a recomputation reads the keys that are there."""
    g, config, inputs = dist.get_world_size(), CONFIGS["llama"], tokens()
    for dtype, again in (("float64", "stage"), ("bfloat16", "none")):
        settings = {"slices": 4, "context_exchange": "keys", "dtype": dtype, "recompute": again}
        pipe = make_pipe(model_of("llama"), mesh=make_mesh(cp=g), **settings)
        group, width = pipe.axes["cp"], getattr(torch, dtype).itemsize
        before = group.payload["all_to_all"]
        pipe.evaluate(inputs, inputs)
        forward = group.payload["all_to_all"] - before
        pipe.step(inputs, inputs)
        both = group.payload["all_to_all"] - before - forward
        numbers = (g - 1) * 64 // g * 2 * config.num_key_value_heads * config.head_dim
        assert forward == numbers * width * config.num_hidden_layers * len(inputs), (dtype, forward)
        assert both == forward // width * (width + max(width, 4)), (dtype, again)


def chosen_exchange() -> None:
    """By itself a layer exchanges what moves fewer bytes; of a whole sequence heads, whose attention is even."""
    g, numbers = dist.get_world_size(), {}
    for kind, slices in product(("auto", *KINDS), (1, 4)):
        pipe = make_pipe(model_of("llama"), mesh=make_mesh(cp=g), slices=slices, context_exchange=kind)
        before = pipe.axes["cp"].payload["all_to_all"]
        pipe.evaluate(tokens(), tokens())
        numbers[kind, slices] = pipe.axes["cp"].payload["all_to_all"] - before
    assert numbers["auto", 1] == numbers["heads", 1] > numbers["keys", 1]
    assert numbers["auto", 4] == numbers["keys", 4] < numbers["heads", 4]


def held_context() -> None:
    """A rank's store has the keys and values of its heads alone, 1/gcd(g, Hkv) of them, or all."""
    g, found = dist.get_world_size(), list[int]()
    for mesh, kind in (({"cp": g}, "heads"), ({"cp": g}, "keys"), ({"dp": g}, "auto")):
        pipe = make_pipe(model_of("llama"), mesh=make_mesh(**mesh), slices=2, num_ranks=1, context_exchange=kind)
        found.append(int(pipe.memory_table(tokens(), tokens()).context[0]))
    assert found[0] * min(g, CONFIGS["llama"].num_key_value_heads) == found[1] == found[2]


def graphs_of(pipe: Pipeline) -> step_graphs.StepGraphs:
    assert pipe._runtime.graphs is not None
    return pipe._runtime.graphs


def recorded(mesh: dict[str, Any] | None = None) -> None:
    """Steps that are replayed as graphs exchange what eager ones do; on a CPU gloo does it in NCCL's place."""
    mesh = {"cp": 2} | (mesh or {})
    device = mesh.get("device_type", "cpu")
    as_on_gpus = ExitStack()
    if device == "cpu":
        as_on_gpus.enter_context(patch.object(step_graphs, "recorder_of", lambda _: RecordedOps()))
        assert "by gloo" in str(graphs_of(make_pipe(model_of("llama"), mesh=make_mesh(**mesh), cuda_graphs=True)))
        as_on_gpus.enter_context(patch.object(RankGroup, "gpu_backend", "nccl"))
    with as_on_gpus, no_rounding_inside():
        for name, kind in (("gemma3", "heads"), ("llama", "keys")):
            whole = model_of(name).to(device)
            settings = {"slices": [20, 1, 43], "context_exchange": kind, "cuda_graphs": True}
            pipe = make_pipe(model_of(name), mesh=make_mesh(**mesh), device=device, **settings)
            for number in range(4):
                whole.zero_grad()
                for parameter in pipe.parameters():
                    parameter.grad = None
                inputs = tokens(seed=number).to(device)
                expected = float(unsplit_step(whole, inputs, labels_of(inputs)))
                assert abs(float(pipe.step(inputs, labels_of(inputs))) - expected) < BOUND * expected
                assert error(pipe, gradients_of(whole), "grad") < BOUND, (name, kind, number)
                assert (graphs_of(pipe).num_recorded > 0) == (number >= 2), graphs_of(pipe).refusal


def dropout() -> None:
    """Draws follow the place and the rank: another order and a recomputation draw the same."""
    config, inputs = copy.deepcopy(CONFIGS["gpt2"]), tokens()
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.3
    settings = {"seed": 3, "slices": SLICES, "num_microbatches": 2, "dtype": torch.float64, "mesh": make_mesh(cp=2)}
    for kind in KINDS:
        found = []
        for schedule, again in (("1f1b", "none"), ("gpipe", "full"), ("1f1b", "selective")):
            torch.manual_seed(5)
            pipe = make_pipe(config, schedule=schedule, recompute=again, context_exchange=kind, **settings)
            loss = pipe.step(inputs, inputs)
            found.append(torch.cat([p.grad.flatten() for p in pipe.parameters() if p.grad is not None]))
            assert (found[-1] - found[0]).abs().max() < 1e-12 * found[0].abs().max(), (kind, schedule, again)
        assert abs(loss - pipe.evaluate(inputs, inputs)) > 1e-3
    seeds = [float(each) for each in pipe.axes["cp"].gather(float(loss))]
    assert len(set(seeds)) == 1


def noise() -> None:
    """Noise on embeddings is that of one process, however slices are cut and shared."""
    inputs, found = tokens(), []
    for mesh, slices in (({}, 1), ({"mesh": make_mesh(cp=2)}, 3), ({"mesh": make_mesh(cp=2)}, [33, 31])):
        torch.manual_seed(5)
        pipe = make_pipe(model_of("llama"), slices=slices, **mesh)
        pipe.add_embedding_noise(7.0, inputs.shape[1])
        with no_rounding_inside():
            found.append(float(pipe.step(inputs, inputs)))
        assert abs(found[0] - float(pipe.evaluate(inputs, inputs))) > 1e-4
    assert max(found) - min(found) < BOUND * found[0], found


def given_loss() -> None:
    """A loss of the user's own is tried on tokens apart, also of whole slices, and needs a token on each rank."""

    def smoothed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1), (
            targets != -100
        ).sum()

    whole, inputs = model_of("llama"), tokens()
    total, count = smoothed(whole(input_ids=inputs, use_cache=False).logits[:, :-1], inputs[:, 1:])
    (total / count).backward()
    pipe = make_pipe(model_of("llama"), mesh=make_mesh(cp=2), slices=3, loss_fn=smoothed)
    assert abs(pipe.step(inputs, inputs) - total / count) < BOUND * total / count
    assert error(pipe, gradients_of(whole), "grad") < BOUND
    pipe = make_pipe(model_of("llama"), mesh=make_mesh(cp=2), slices=SLICES, loss_fn=smoothed)
    with pytest.raises(SlipstreamError, match="a slice of 1 tokens with a loss_fn, shared by 2 ranks"):
        pipe.step(inputs, inputs)

    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    pipe = make_pipe(
        model_of("llama"), mesh=make_mesh(cp=2), slices=3, loss_fn=lambda o, t: causal_cross_entropy(o * scale, t)
    )
    with pytest.raises(SlipstreamError, match=r"loss_fn has a parameter of its own, \(\).*Use dp=1 and cp=1"):
        pipe.step(inputs, inputs)
    assert scale.grad is None

    def squared(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = smoothed(logits, targets)
        return total**2, count

    pipe = make_pipe(model_of("llama"), mesh=make_mesh(cp=2), slices=1, loss_fn=squared)
    with pytest.raises(SlipstreamError, match="it must be a sum over"):
        pipe.step(inputs, inputs)


def refused() -> None:
    """What can't be exact is refused on every rank before anything runs, with what to type."""
    alone = {"num_hidden_layers": 2, "num_key_value_heads": 1, "num_attention_heads": 1}
    cases = {
        r"1 query heads can't be spread over cp=2 ranks. Give cp a divisor of 1: 1.* Use cp=1": LlamaConfig(
            **CONFIGS["llama"].to_diff_dict() | alone
        ),
        r"'lfm2' can't be trained with cp=2.*carries a state": HYBRIDS["lfm2"],
        r"'qwen3_next' can't be trained with cp=2.*carries a state": HYBRIDS["qwen3_next"],
        r"'bloom' can't be trained with cp=2.*its own code attends to": BloomConfig(
            vocab_size=61, hidden_size=32, n_layer=2, n_head=4
        ),
    }
    for match, config in cases.items():
        for slices in (1, 4):
            with pytest.raises(SlipstreamError, match=match):
                make_pipe(config, mesh=make_mesh(cp=2), slices=slices, seed=0, context_exchange="heads")
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    with pytest.raises(SlipstreamError, match=r"an nn\.Sequential on a mesh with cp=2"):
        make_pipe(layers, mesh=make_mesh(cp=2))
    with pytest.raises(SlipstreamError, match="pp=2 x dp=1 x cp=2 x tp=1 has 4 ranks, but 2 processes run"):
        make_mesh(pp=2, cp=2)


def resumed() -> None:
    """Three steps of AdamW, with sharded state or not, whose last one another mesh does, as one process does them."""
    whole, inputs = model_of("llama, tied"), [tokens(seed=seed) for seed in range(3)]
    optimizer, losses = torch.optim.AdamW(whole.parameters(), lr=1e-2), list[Tensor]()
    for each in inputs:
        optimizer.zero_grad()
        losses.append(unsplit_step(whole, each, each))
        optimizer.step()
    for shard, meshes in (("none", ({"cp": 2}, {"pp": 2})), ("optimizer", ({"pp": 2}, {"cp": 2}))):
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        for mesh, steps in zip(meshes, (range(2), range(2, 3)), strict=True):
            pipe = make_pipe(
                model_of("llama, tied"), mesh=make_mesh(**mesh), slices=SLICES, num_microbatches=2, shard=shard
            )
            own = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
            if steps.start:
                pipe.load(folder[0], optimizer=own)
            for step in steps:
                own.zero_grad()
                loss = pipe.step(inputs[step], inputs[step])
                assert abs(loss - losses[step]) < 1e-9 * losses[step], (mesh, shard, step)
                own.step()
            pipe.save(folder[0], steps.stop, optimizer=own)
        pipe.evaluate(inputs[0], inputs[0])  # publishes the last update
        assert error(pipe, dict(whole.named_parameters()), "data") < 1e-9, (meshes, shard)


PER_KIND: list[tuple[str, Callable[..., object], str, dict[str, Any]]] = [
    *((name, rows, name, {}) for name in (*MODELS, "gemma2", "keys wider than values")),
    *((f"documents, {name}", documents, name, {}) for name in ("llama", "gemma3", "gpt_oss")),
    *((f"sequences, {name}", sequences, name, {}) for name in ("llama", "phi3")),
    *((f"recompute={again}", rows, "llama", {"recompute": again}) for again in ("full", "stage+full", "selective")),
]
TWO: dict[str, Callable[[], object]] = {
    f"{kind}, {title}": partial(run, name, {"cp": 2}, context_exchange=kind, **settings)
    for kind, (title, run, name, settings) in product(KINDS, PER_KIND)
}
PIPELINE, REPLICAS = FOUR["pp2 cp2"], FOUR["dp2 cp2"]
LONGER = "mistral, window of 7"  # of four layers
ON_HOST = ["gpt_oss", "llama", "gemma2", "gemma3", "mixtral", "keys wider than values", "llama4_text", LONGER]
ON_HOST += ["qwen3", "phi3"]
MESHES: dict[str, Callable[[], object]] = {
    f"{mesh}, {kind}, {name}": partial(rows, name, FOUR[mesh], context_exchange=kind)
    for mesh, kind, name in product(FOUR, KINDS, MODELS)
    if (mesh[-3:], name) != ("tp2", "gpt_oss")
} | {
    "zb-v": partial(rows, LONGER, PIPELINE, schedule="zb-v", stages_per_rank=2),
    "interleaved": partial(rows, LONGER, PIPELINE, schedule="interleaved-1f1b", stages_per_rank=2, recompute="full"),
    "zb-h1": partial(rows, "llama", PIPELINE, schedule="zb-h1", recompute="selective"),
    "zb-h1, keys": partial(rows, "gpt_oss", PIPELINE, schedule="zb-h1", context_exchange="keys"),
    "indivisible": partial(indivisible, {"cp": 4}),
    "offload": partial(rows, "llama", PIPELINE, offload=0.5),
    "spread": partial(rows, "llama, tied", PIPELINE, vocabulary="spread"),
    "limit": partial(rows, "llama", PIPELINE, memory_limit=1e9),
    "auto": partial(rows, "llama", PIPELINE, schedule="auto", slices="auto", num_microbatches=1),
    "sharded optimizer": partial(rows, "llama", REPLICAS, shard="optimizer"),
    "sharded parameters": partial(rows, "llama", REPLICAS, shard="parameters"),
    "sequence parallel": partial(rows, "llama", FOUR["cp2 tp2"], sequence_parallel=True),
    "documents": partial(documents, "gemma3", PIPELINE, num_microbatches=2),
    "sequences": partial(sequences, "llama, tied", PIPELINE),
    "sequences, cp4": partial(sequences, "phi3", {"cp": 4}),
    "qwen3_moe": partial(rows, "qwen3_moe", PIPELINE),
    "llama4": partial(rows, "llama4_text", PIPELINE),
}
MESHES |= (
    {
        f"on the host, {kind}, {name}": partial(rows, name, PIPELINE, context_exchange=kind, context="host")
        for name, kind in zip(ON_HOST, cycle(reversed(KINDS)), strict=False)
    }
    | {
        f"on the host by half, {kind}, {name}": partial(rows, name, PIPELINE, context_exchange=kind, context=0.5)
        for name, kind in zip(ON_HOST[:4], cycle(KINDS), strict=False)
    }
    | {
        f"on the host, replicas, {name}": partial(rows, name, {"pp": 2, "dp": 2}, context=context, recompute=recompute)
        for name, context, recompute in zip(
            [*ON_HOST, "qwen3_next"], cycle(["host", 0.6, "host"]), cycle(["stage", "none"]), strict=False
        )
    }
    | {
        "on the host, documents": partial(
            documents, "gemma3", PIPELINE, num_microbatches=2, context="host", context_exchange="keys"
        ),
        "on the host, sequences": partial(
            sequences, "llama, tied", PIPELINE, context="host", context_gradients="model"
        ),
    }
)
OTHERS = by_name(
    *(
        pairs,
        values,
        routers,
        what_it_says,
        apart,
        exchanged_bytes,
        gathered_bytes,
        chosen_exchange,
        held_context,
        dropout,
        noise,
    ),
    *(recorded, given_loss, refused, resumed, adapters, planned),
)
TWO |= OTHERS | {
    f"on the host, two replicas, {name}": partial(rows, name, {"dp": 2}, context=context, recompute=recompute)
    for name, context, recompute in zip(
        [*ON_HOST, "qwen3_next"], cycle([0.6, "host", "host"]), cycle(["none", "stage"]), strict=False
    )
}
CASES = TWO | MESHES

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:])
