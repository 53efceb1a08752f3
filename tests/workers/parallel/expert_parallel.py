"""Cases of expert parallelism: experts on different ranks, between which every layer exchanges tokens."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from slipstream import Memory, Parallelism, Pipeline, SequenceLoss, SlipstreamError, make_mesh
from slipstream.cost import LONE_UPDATE, MeasuredCosts, profile_behind
from slipstream.model import causal_cross_entropy
from slipstream.model.anatomy import expert_modules
from slipstream.model.toy import perturb_parameters
from slipstream.parallel import RankGroup
from slipstream.pipeline.execution import step_graphs
from slipstream.planner.ragged import StepPlan
from slipstream.schedule import make_schedule
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    VOCABULARY,
    build,
    gradients,
    labels_of,
    no_rounding_inside,
    unsplit_step,
)
from support.architectures import tokens as random_tokens
from support.mixtures import mixture
from support.mixtures import unsplit_step as balanced_step
from support.parallel.group_cases import by_name, run_cases
from support.pipelines import make_pipe
from support.preferences import log_probabilities, preference, references
from support.recorded_ops import RecordedOps

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_LIKE_DEEPSEEK = _COMMON | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**_COMMON, num_experts=8),
    "mixtral": ARCHITECTURES["mixtral"],
    "gpt_oss": GptOssConfig(**_COMMON, num_local_experts=4, sliding_window=7),
    "deepseek_v3": DeepseekV3Config(
        **_LIKE_DEEPSEEK | {"num_key_value_heads": 4, "head_dim": None},
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "glm4_moe": Glm4MoeConfig(**_LIKE_DEEPSEEK),
}
ROWS = 2  # of each replica
SLICES = [20, 9, 30, 5]


def model_of(name: str) -> PreTrainedModel:
    """A model with biases that aren't zero, those that correct its routers among them."""
    model = build(MODELS[name])
    perturb_parameters(model)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return model


def batch(replicas: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    inputs = random_tokens(ROWS * replicas, seed=seed)
    return inputs, labels_of(inputs)


def own(pipe: Pipeline, whole: Tensor) -> Tensor:
    return whole[ROWS * pipe.replica : ROWS * (pipe.replica + 1)]


def wrong_by(pipe: Pipeline, wanted: Mapping[str, Tensor]) -> float:
    """The largest error of this rank's parts of gradients."""
    floor = 1e-6 * max(float(each.abs().max()) for each in wanted.values())
    errors = [0.0]
    for shard in pipe.parameter_shards():
        if not shard.parameter.requires_grad:
            continue
        part, grad = shard.share.take(wanted[shard.name]), shard.parameter.grad
        assert grad is not None, shard.name
        part = part[shard.first_row : shard.first_row + len(grad)]
        errors.append(float((grad - part).abs().max()) / max(float(wanted[shard.name].abs().max()), floor))
    return max(errors)


def norm_of(wanted: Mapping[str, Tensor]) -> float:
    return float(torch.sqrt(torch.stack([each.square().sum() for each in wanted.values()]).sum()))


def check_step(pipe: Pipeline, whole: PreTrainedModel, inputs: Tensor, labels: Tensor) -> None:
    """One step's loss, gradients and norm are those of the whole model in one process."""
    expected = float(unsplit_step(whole, inputs, labels))
    assert abs(float(pipe.step(own(pipe, inputs), own(pipe, labels))) - expected) < BOUND * expected
    wanted = gradients(whole)
    trained = {shard.name for shard in pipe.parameter_shards() if shard.parameter.requires_grad}
    assert set().union(*RankGroup(dist.group.WORLD).gather(trained)) == wanted.keys()
    assert wrong_by(pipe, wanted) < BOUND
    norm = float(pipe.clip_grad_norm_(torch.inf))
    assert abs(norm - norm_of(wanted)) < BOUND * norm


@no_rounding_inside()
def exact(name: str, make: Callable[[], DeviceMesh], **options: Any) -> Pipeline:
    mesh = make()
    settings = {"slices": SLICES, "num_microbatches": 2, "mesh": mesh, "device": mesh.device_type} | options
    pipe = make_pipe(model_of(name), **settings)
    rows = (each.to(mesh.device_type) for each in batch(pipe.num_replicas))
    check_step(pipe, model_of(name).to(mesh.device_type), *rows)
    return pipe


def replicas(ep: int = 2) -> DeviceMesh:
    return make_mesh(dp=dist.get_world_size(), ep=ep)


def shared_slices() -> None:
    """Ranks that share every slice have different experts; a recomputed layer exchanges tokens and heads again."""
    for name, options in (
        ("qwen3_moe", {}),
        ("qwen3_moe", {"memory": Memory(recompute="full")}),
        ("gpt_oss", {"memory": Memory(recompute="stage+full"), "parallel": Parallelism(shard="optimizer")}),
    ):
        exact(name, lambda: make_mesh(cp=2, ep=2), **options)


def memory() -> None:
    """Replays exchange tokens once more, on all ranks of the group; so do split backwards, and what was offloaded."""
    exact("qwen3_moe", replicas, memory=Memory(recompute="full"))
    exact("qwen3_moe", replicas, memory=Memory(recompute="selective"))
    exact("gpt_oss", replicas, memory=Memory(recompute=2, offload=0.5))


def in_one_process() -> None:
    """Two ranks of a pipeline in each process, alternately."""
    exact("qwen3_moe", replicas, schedule="interleaved-1f1b", stages_per_rank=2, num_ranks=1, partition=[2, 1])
    exact("qwen3_moe", replicas, schedule="zb-h1", num_ranks=2)


def sharded() -> None:
    """Three steps of AdamW give one process's weights, with optimizer state or all of a parameter sharded over the
    ranks that hold it."""
    three_steps(Parallelism(), 2, 1)
    three_steps(Parallelism(shard="optimizer"), 1, 2)
    three_steps(Parallelism(shard="parameters"), 2, 1)


@no_rounding_inside()
def three_steps(parallel: Parallelism, first_ep: int, last_ep: int) -> None:
    """Two steps, a checkpoint, and a third step by ranks with other experts."""
    whole, folder = model_of("gpt_oss"), [tempfile.mkdtemp()]
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    dist.broadcast_object_list(folder)
    for ep, steps in ((first_ep, range(2)), (last_ep, range(2, 3))):
        pipe = make_pipe(model_of("gpt_oss"), slices=SLICES, mesh=replicas(ep), parallel=parallel)
        ours = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        if steps.start:
            pipe.load(folder[0], optimizer=ours)
        for seed in steps:
            for optimizer in (theirs, ours):
                optimizer.zero_grad()
            check_step(pipe, whole, *batch(pipe.num_replicas, seed))
            for optimizer in (theirs, ours):
                optimizer.step()
        if not steps.start:
            pipe.save(folder[0], steps.stop, optimizer=ours)
    assert state_error(pipe, whole) < 1e-9


def state_error(pipe: Pipeline, whole: PreTrainedModel) -> float:
    found = pipe.state_dict()
    wanted = {name: each for name, each in whole.state_dict().items() if each.is_floating_point()}
    return max((float((found[name] - each).abs().max()) for name, each in wanted.items()), default=0) if found else 0.0


@no_rounding_inside()
def packed_documents() -> None:
    """Documents on one replica alone, whose first packed slice runs a token that the others don't run; in an evaluation
    of sharded parameters too."""
    whole, shards = model_of("qwen3_moe"), (Parallelism(), Parallelism(shard="parameters"))
    expected = 0.0
    for parallel in shards:
        pipe = make_pipe(model_of("qwen3_moe"), slices=SLICES, mesh=replicas(), parallel=parallel)
        inputs, labels = batch(pipe.num_replicas)
        documents = torch.zeros_like(inputs)
        documents[0, 25:], documents[1, 7:] = 1, 1
        expected = expected or documents_step(whole, inputs, labels, documents)
        given = own(pipe, documents) if pipe.replica == 0 else None
        for run in (pipe.evaluate, pipe.step):
            found = float(run(own(pipe, inputs), own(pipe, labels), document_ids=given))
            assert abs(found - expected) < BOUND * expected
        assert wrong_by(pipe, gradients(whole)) < BOUND


def documents_step(whole: PreTrainedModel, inputs: Tensor, labels: Tensor, documents: Tensor) -> float:
    """The whole model's step on each document by itself."""
    pieces = []
    for row, each, ids in zip(inputs, labels, documents, strict=True):
        ends = [0, *(torch.nonzero(ids.diff()).flatten() + 1).tolist(), len(ids)]
        pieces += [(row[a:b][None], each[a:b][None]) for a, b in pairwise(ends)]
    return lists_step(whole, pieces)


def lists_step(whole: PreTrainedModel, pieces: list[tuple[Tensor, Tensor]]) -> float:
    """The whole model's step on sequences of any lengths, one after the other."""
    count, loss = sum(int((labels[:, 1:] != -100).sum()) for _, labels in pieces), 0.0
    for inputs, labels in pieces:
        total, _ = causal_cross_entropy(whole(input_ids=inputs, use_cache=False).logits[:, :-1], labels[:, 1:])
        (total / count).backward()
        loss += float(total.detach()) / count
    return loss


@no_rounding_inside()
def lists_of_sequences() -> None:
    """Replicas with other numbers of sequences and tokens run one list of actions, in a step and in an evaluation."""
    pipe, whole = make_pipe(model_of("qwen3_moe"), slices=5, num_microbatches=3, mesh=replicas()), model_of("qwen3_moe")
    for lengths in ([[31, 2, 17, 40], [3, 5]], [[2], [60, 20, 33]]):
        for model in (whole, pipe):
            for parameter in model.parameters():
                parameter.grad = None
        rows = [[random_tokens(1, length, seed=length + r)[0] for length in each] for r, each in enumerate(lengths)]
        rows = [rows[place % 2] for place in range(pipe.num_replicas)]
        expected = lists_step(whole, [(row[None], row[None]) for each in rows for row in each])
        mine = rows[pipe.replica]
        assert abs(float(pipe.step(mine, mine)) - expected) < BOUND * expected
        assert len(pipe.last_step.microbatches) == min(3, max(map(len, lengths)))
        assert wrong_by(pipe, gradients(whole)) < BOUND
        assert abs(float(pipe.evaluate(mine, mine)) - expected) < BOUND * expected
        chances = pipe.log_probabilities(mine, mine)
        for row, found in zip(mine, chances, strict=True):
            wanted = whole(input_ids=row[None]).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])
            assert float((found[1:] - wanted.squeeze(-1)).abs().max()) < BOUND


def fewer_microbatches() -> None:
    """Replicas run as many microbatches as the one with the fewest; where that would hold more than the memory limit,
    the others run padding. A given number is kept, and padding takes no part in the load-balancing loss."""
    rows = [[random_tokens(1, 60, seed=row)[0] for row in range(3)], [random_tokens(1, 9)[0]]]
    open_ = {"slices": "auto", "schedule": "auto", "mesh": replicas()}
    for limit, wanted in ((None, [[(180,)], [(9,)]]), (2.3e6, [[(60,)] * 3, [(9,), (1,), (1,)]])):
        pipe = make_pipe(model_of("qwen3_moe"), memory=Memory(limit=limit), **open_)
        pipe.step(rows[pipe.replica], rows[pipe.replica])
        assert [microbatch.slices for microbatch in pipe.last_step.microbatches] == wanted[pipe.replica]
    few, whole = [rows[0][:2], [rows[0][2][:3]]], mixture("mixtral")
    settings: dict[str, Any] = {"slices": 5, "num_microbatches": 2, "router_loss": "per_layer", "mesh": replicas()}
    pipe = make_pipe(mixture("mixtral"), **settings)
    with no_rounding_inside():
        pipe.step(few[pipe.replica], few[pipe.replica])
        balanced_step(whole, [(row[None], row[None]) for each in few for row in each])
    assert [len(microbatch.slices) for microbatch in pipe.last_step.microbatches] == [5, 5]
    assert wrong_by(pipe, gradients(whole)) < BOUND


def plans_that_differ() -> None:
    """Plans of other orders are refused on every rank, and rows whose number of slices their length decides."""
    pipe = make_pipe(model_of("qwen3_moe"), slices=2, mesh=replicas())
    rows = [random_tokens(1, 9)[0]]
    cut = (4, 5) if pipe.replica else (9,)
    plan = StepPlan(((0,),), (cut,), make_schedule("1f1b", 1, 1, (len(cut),)))
    with pytest.raises(SlipstreamError, match="the replicas' plans differ in their order"):
        pipe.step(rows, rows, plan=plan)
    assert float(pipe.step(rows, rows)) > 0
    pipe = make_pipe(model_of("qwen3_moe"), slices="auto", mesh=replicas())
    few = random_tokens(2, 3 if pipe.replica else 20)
    with pytest.raises(SlipstreamError, match="the replicas would run different actions"):
        pipe.evaluate(few, few)


def steady_steps() -> None:
    """Once replicas have found that their order is one, no step gathers values: it travels with the batch's numbers."""
    pipe = make_pipe(model_of("qwen3_moe"), slices=3, num_microbatches=2, mesh=replicas())
    rows, sequences = random_tokens(ROWS, 24), [*random_tokens(ROWS, 24)]
    for given in (rows, sequences):
        pipe.step(given, given)
        with patch.object(dist, "all_gather_object", side_effect=AssertionError("a gather of values")):
            pipe.step(given, given)
            pipe.evaluate(given, given)


@no_rounding_inside()
def preferences() -> None:
    """A loss of pairs, on rows and on sequences of other lengths on each replica, and where ranks share slices too."""
    for mesh, lengths in (
        (replicas(), (24,) * 4),
        (replicas(), (31, 2, 17, 40)),
        (make_mesh(cp=2, ep=2), (9, 7, 5, 12)),
    ):
        loss_fn, whole = SequenceLoss(preference, group_size=2), model_of("qwen3_moe")
        pipe = make_pipe(model_of("qwen3_moe"), slices=3, num_microbatches=1, mesh=mesh, loss_fn=loss_fn)
        sequences = [random_tokens(1, length, seed=place)[0] for place, length in enumerate(lengths)]
        wanted = torch.cat([log_probabilities(whole, each[None], each[None]) for each in sequences])
        expected = preference(wanted, references(4)).mean()
        expected.backward()
        mine = slice(2 * pipe.replica, 2 * pipe.replica + 2) if pipe.num_replicas > 1 else slice(0, 4)
        given: Any = torch.stack(sequences[mine]) if len({*lengths}) == 1 else sequences[mine]
        loss = pipe.step(given, given, sequence_values=references(4)[mine])
        assert abs(loss - expected) < BOUND * abs(expected)
        assert wrong_by(pipe, gradients(whole)) < BOUND
        assert torch.allclose(pipe.sequence_log_probabilities(), wanted[mine], rtol=1e-10)


@no_rounding_inside()
def logits() -> None:
    """Each replica has the logits of its own rows, whose tokens went to experts of the others."""
    pipe, whole = make_pipe(model_of("deepseek_v3"), slices=SLICES, mesh=replicas()), model_of("deepseek_v3")
    inputs, _ = batch(pipe.num_replicas)
    wanted = own(pipe, whole(input_ids=inputs, use_cache=False).logits)
    found = pipe.logits(own(pipe, inputs))
    assert isinstance(found, Tensor)
    assert (found - wanted).abs().max() < BOUND * wanted.abs().max()


def dropout() -> None:
    """Draws are those of replicas that each have all experts, in another order and recomputed too."""
    config, found = copy.deepcopy(MODELS["qwen3_moe"]), []
    config.attention_dropout = 0.3
    for ep, schedule, again in (
        (1, "1f1b", "none"),
        (2, "1f1b", "none"),
        (2, "gpipe", "full"),
        (2, "zb-h1", "selective"),
    ):
        torch.manual_seed(5)
        memory = Memory(recompute=again)
        pipe = make_pipe(build(config).train(), slices=SLICES, mesh=replicas(ep), schedule=schedule, memory=memory)
        pipe.step(*(own(pipe, each) for each in batch(pipe.num_replicas)))
        found.append(next(p.grad for name, p in pipe.named_parameters() if name.endswith("0.self_attn.q_proj.weight")))
        assert (found[-1] - found[0]).abs().max() < BOUND * found[0].abs().max(), (ep, schedule, again)
    whole = build(config).eval()
    unsplit_step(whole, *batch(pipe.num_replicas))
    assert (gradients(whole)["model.layers.0.self_attn.q_proj.weight"] - found[0]).abs().max() > 1e-3 * found[
        0
    ].abs().max()


def _with_squared_weights(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return batched_mm_experts_forward(module, hidden, index, weights**2)  # type: ignore[no-any-return]


def refusals() -> None:
    """What can't be exact is refused on every rank, with what to type."""
    with pytest.raises(SlipstreamError, match=r"ep=3: experts are spread over replicas, of which there are 2.*1, 2"):
        make_mesh(dp=2, ep=3)
    mesh, odd = replicas(), Qwen3MoeConfig(**_COMMON, num_experts=3)
    for model, words in (
        (build(ARCHITECTURES["llama"]), "ep=2: 'llama' has no experts that can be spread"),
        (build(odd), "has 3 experts, which 2 ranks can't share evenly. Choose from 1, 3"),
        (nn.Sequential(nn.Linear(2, 2)), "an nn.Sequential on a mesh with ep=2"),
    ):
        with pytest.raises(SlipstreamError, match=words):
            make_pipe(model, mesh=mesh)
    ExpertsInterface.register("squared", _with_squared_weights)
    own: PreTrainedModel = build(ARCHITECTURES["mixtral"])
    own.set_experts_implementation("squared")
    with pytest.raises(SlipstreamError, match=r"'squared' is a function of your own in ExpertsInterface.*Use ep=1"):
        make_pipe(own, mesh=mesh)
    with patch.object(step_graphs, "recorder_of", lambda _: RecordedOps()):
        said = str(make_pipe(model_of("qwen3_moe"), mesh=mesh, cuda_graphs=True))
    assert "CUDA graphs: none, as how many tokens go to each expert is read on the host" in said
    assert "ep=2" in said


def exchanged_bytes() -> None:
    """All ranks together receive, there and back, the rows of tokens that chose experts of another rank, backward as
    many, and in a forward from each rank how many rows it has for each expert."""
    pipe, whole, chosen = make_pipe(model_of("qwen3_moe"), slices=SLICES, mesh=replicas()), model_of("qwen3_moe"), []
    inputs, labels = batch(pipe.num_replicas)
    for _, experts in expert_modules(whole):
        experts.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    whole(input_ids=inputs)
    group, num_experts = pipe.axes["ep"], 8
    here = torch.arange(group.size)[:, None]
    rows = sum(int((index.reshape(group.size, -1) // (num_experts // group.size) != here).sum()) for index in chosen)
    sent, runs = rows * 32 * 8, 3 * len(SLICES)
    counted = runs * group.size * (group.size - 1) * num_experts // group.size * 8
    for run, ways in ((pipe.evaluate, 2), (pipe.step, 4)):
        before, calls = group.payload["all_to_all"], group.calls["all_to_all"]
        run(own(pipe, inputs), own(pipe, labels))
        assert sum(group.gather(group.payload["all_to_all"] - before)) == ways * sent + counted, run
        assert group.calls["all_to_all"] - calls == (1 + ways) * runs


@no_rounding_inside()
def router_loss() -> None:
    """The load-balancing loss of each layer and microbatch is that of one process."""
    pipe = make_pipe(mixture("mixtral"), slices=SLICES, num_microbatches=2, router_loss="per_layer", mesh=replicas())
    whole = mixture("mixtral")
    inputs, labels = batch(pipe.num_replicas)
    pipe.step(own(pipe, inputs), own(pipe, labels))
    balanced_step(whole, [(row[None], label[None]) for row, label in zip(inputs, labels, strict=True)])
    assert wrong_by(pipe, gradients(whole)) < BOUND


@no_rounding_inside()
def adapted() -> None:
    """LoRA on attention and on the experts' weights, of which each rank has the factors of its experts."""
    for name, experts in (("qwen3_moe", ("gate_up_proj", "down_proj")), ("gpt_oss", ("gate_up_proj", "down_proj"))):
        config = LoraConfig(
            r=8, target_modules=["q_proj", "v_proj"], target_parameters=[f"mlp.experts.{each}" for each in experts]
        )
        whole, mine = (get_peft_model(model_of(name), config, autocast_adapter_dtype=False) for _ in range(2))
        for model in (whole, mine):
            torch.manual_seed(5)
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    nn.init.normal_(parameter, std=0.1)
        pipe = make_pipe(mine, slices=SLICES, mesh=replicas())
        check_step(pipe, whole.get_base_model(), *batch(pipe.num_replicas))


def pipelines(every: bool = False) -> None:
    """Four processes: two replicas of a pipeline, whose ranks of one stage hold different experts."""
    mesh = partial(make_mesh, pp=2, dp=2, ep=2)
    for name in ("gpt_oss", "qwen3_moe")[: 1 + every]:
        exact(name, mesh)
    memory, parallel = Memory(recompute="full"), Parallelism(shard="optimizer")
    exact("qwen3_moe", mesh, schedule="zb-h1", memory=memory, parallel=parallel)


def planned() -> None:
    """Ranks with different experts are measured together, and a plan is made by it before the first step."""
    open_ = {"schedule": "auto", "slices": "auto", "num_microbatches": 1, "seq_len": 64}
    pipe = exact("qwen3_moe", replicas, num_ranks=2, **open_)
    assert pipe.plan is not None
    profile = profile_behind(pipe.plan.costs)
    assert profile.degrees.experts == 2
    a_half = 8 // 2 * 3 * 32 * 16  # of a layer's experts
    assert {0, a_half} <= {stage.num_in_experts for stage in profile.stages}
    costs = MeasuredCosts(profile)
    others = costs.num_parameters(range(3)) - 3 * a_half
    both = replace(LONE_UPDATE, copies=2, shard="optimizer")
    assert costs.num_optimized(range(3), both) == others / 2 + 3 * a_half


def four_replicas(every: bool = False) -> None:
    """Four processes, each expert on two of them or on one, with their gradients and optimizer state sharded or not."""
    ways: list[tuple[int, Literal["none", "optimizer", "parameters"]]] = [
        *((2, "none"), (2, "parameters"), (4, "optimizer")),
        *((2, "optimizer"), (4, "none"), (4, "parameters")),
    ]
    for ep, shard in ways[: 6 if every else 3]:
        exact("qwen3_moe", partial(replicas, ep), parallel=Parallelism(shard=shard))
    three_steps(Parallelism(shard="optimizer"), 2, 4)


def tensor_ranks(every: bool = False) -> None:
    """Four processes: ranks that share layers send other tokens each, and all hold the experts of their replica."""
    models = (("mixtral", True), ("deepseek_v3", False), ("qwen3_moe", False), ("glm4_moe", True))
    for name, sequence in models[: 4 if every else 2]:
        parallel = Parallelism(sequence_parallel=sequence)
        exact(name, partial(make_mesh, dp=2, tp=2, ep=2), parallel=parallel)


def every_model_and_way_to_shard() -> None:
    for case in (pipelines, four_replicas, tensor_ranks):
        case(every=True)


def of_model(name: str) -> Callable[[], None]:
    case = partial(exact, name, replicas)
    case.__name__ = name  # type: ignore[attr-defined]
    return case


CASES = by_name(
    *(of_model(name) for name in MODELS),
    *(
        shared_slices,
        memory,
        in_one_process,
        sharded,
        steady_steps,
        preferences,
        logits,
        dropout,
        packed_documents,
        lists_of_sequences,
        fewer_microbatches,
        plans_that_differ,
        exchanged_bytes,
        router_loss,
        adapted,
        planned,
        refusals,
    ),
)
OF_FOUR = by_name(pipelines, four_replicas, tensor_ranks, every_model_and_way_to_shard)


if __name__ == "__main__":
    run_cases(CASES | OF_FOUR, sys.argv[1:])
