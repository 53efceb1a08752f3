"""What is given to a Pipeline by mistake is refused before anything runs, in words that say what to give, and a setting
in the same words by Python and by YAML."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slipstream import Pipeline, Precision, SlipstreamError, gpipe, make_schedule, one_f_one_b
from slipstream.model import causal_cross_entropy
from slipstream.planner.ragged import StepPlan
from slipstream.schedule import add_communication, add_recompute
from slipstream.train.config.config_values import dump_config, parse_config
from support.architectures import ARCHITECTURES, LENGTH, VOCABULARY, build, llama
from support.options import RECORDS
from support.pipelines import make_pipe
from support.ragged_batches import batch_of
from support.refusals import refused

TOKENS = torch.arange(4 * 32).reshape(4, 32) % VOCABULARY
NAN = float("nan")

ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "1f1p"}, "schedule='1f1p' is not known; did you mean '1f1b'"),
    ({"schedule": "atuo"}, "schedule='atuo' is not known; did you mean 'auto'? .. , auto, auto-v, or"),
    ({"schedule": "zbv"}, "schedule='zbv' is not known; did you mean 'zb-v'? .. , auto, auto-v, or"),
    ({"schedule": "auto-v", "stages_per_rank": 1}, "'auto-v' has exactly 2"),
    ({"schedule": 5}, "schedule=5: give a name, such as '1f1b', or a slipstream.Schedule."),
    ({"schedule": one_f_one_b(3, 1, 4), "num_ranks": 2}, "is for 3 ranks, but there are 2"),
    ({"schedule": one_f_one_b(1, 1, 4), "slices": "auto"}, "slices='auto' with the schedule '1f1b', which has 4"),
    (
        {"schedule": one_f_one_b(1, 1, 4), "slices": [40, 8, 8, 4, 4]},
        "slices=[40, 8, 8, 4, 4] are 5 lengths, but .. '1f1b' has 4 slices",
    ),
    (
        {"schedule": one_f_one_b(1, 2, 4), "slices": 4, "num_flushes": 2},
        "num_flushes=2 with the schedule '1f1b' .. in_flushes(schedule, 2)",
    ),
    ({"num_microbatches": 6, "num_flushes": 4}, "num_flushes=4 for 6 microbatches .. 1, 2, 3, 6"),
    ({"stages_per_rank": 3}, "stages_per_rank=3, but the schedule '1f1b' has exactly 1. Give stages_per_rank=1"),
    ({"stages_per_rank": 2}, "has exactly 1 .. interleaved-1f1b"),
    ({"schedule": "zb-v", "stages_per_rank": 1}, "stages_per_rank=1, but the schedule 'zb-v' has exactly 2"),
    ({"slices": 0}, "slices=0: give a count from 1"),
    ({"slices": "two"}, "slices='two': give a count from 1, such as 8"),
    ({"slices": [16, 0]}, "slices=[16, 0]: give a count from 1, such as 8, or the token lengths"),
    ({"slices": [8, "x"]}, "slices=[8, 'x']: give a count from 1"),
    ({"num_microbatches": 0}, "num_microbatches=0: give a whole number from 1"),
    ({"num_microbatches": "2"}, "num_microbatches='2': give a whole number from 1"),
    ({"num_microbatches": 1.5}, "num_microbatches=1.5: give a whole number from 1"),
    ({"num_ranks": 5}, "5 stages for 4 layers: every stage needs a layer. Use 1 to 4"),
    ({"schedule": "interleaved-1f1b", "stages_per_rank": 3, "num_ranks": 2}, "6 stages for 4 layers"),
    ({"partition": "even"}, "partition='even': give 'auto' or the number of layers"),
    ({"partition": [1]}, "partition=[1] has 1 stages and 1 layers"),
    ({"num_ranks": 3, "partition": [2, 0, 2]}, "partition=[2, 0, 2] .. the last 0, for the head alone"),
    *(
        (
            {"num_ranks": 2, "partition": partition},
            f"partition={partition} has {len(partition)} stages .. takes 2 stages of at least half a layer, in "
            "multiples of 0.5 .. the head alone), 4 layers in all",
        )
        for partition in ([3, 2], [1.25, 2.75], [2.5, 2.5], [4, 0, 0], [5, -1], [1.5, 1.5, 1], [NAN, 2])
    ),
    ({"device": "gpu"}, "device='gpu' isn't one of torch's; give 'cpu', 'cuda' or 'cuda:0'"),
    ({"device": "cuda:99"}, "device='cuda:99' isn't there: this machine's GPUs are"),
    ({"mesh": "pp"}, "mesh='pp': give one made by slipstream.make_mesh"),
    ({"memory": {"limit": 2}}, "memory={'limit': 2}: give a slipstream.Memory, such as memory="),
    ({"precision": "bf16"}, "give a slipstream.Precision"),
    ({"dtype": "int8"}, "precision.dtype='int8': give a floating-point dtype, float64, float32"),
    ({"memory_limit": -1e9}, "memory.limit=-1000000000.0"),
    ({"memory_limit": "12GB"}, "memory.limit='12GB'"),
    ({"memory_limit": NAN}, "memory.limit=nan"),
    ({"offload": -0.1}, "memory.offload=-0.1: give a number from 0 to 1"),
    ({"recompute": 0}, "memory.recompute=0"),
    ({"recompute": 1.5}, "memory.recompute=1.5"),
    ({"num_ranks": 2, "recompute": 3}, "memory.recompute=3: give 'none', 'selective', 'full', .. or .. 1 to 2 here"),
    ({"num_ranks": 2, "partition": [1.5, 2.5], "recompute": 4}, "1 to 3 here"),
    ({"num_ranks": 2, "recompute": "segments"}, "memory.recompute='segments': give 'none', 'selective', 'full', "),
    *(
        (
            {"schedule": add_recompute(gpipe(2, 1, 4)), "slices": 4, "recompute": recompute},
            f"'gpipe' has 0R0. .. , but memory.recompute='{recompute}'. Say what",
        )
        for recompute in ("none", "full")
    ),
    (
        {"schedule": add_communication(gpipe(2, 1, 4)), "recompute": "stage"},
        "recompute is set, but .. has its sends .. Leave memory.recompute out",
    ),
    (
        {"schedule": add_communication(gpipe(2, 1, 2)), "slices": 2, "offload": 0.5},
        "offload is set, but .. has its sends .. Leave memory.offload out",
    ),
    ({"microbatches": [[2, [12, 12]], [2, [23]]]}, "microbatches[1] has slices of 23 tokens in all, microb"),
    ({"microbatches": [[2, [24]], [2, []]]}, "give each one's rows and the tokens of its slices, such as [[2, ["),
    ({"microbatches": [[0, [24]]]}, "give each one's rows"),
    ({"microbatches": []}, "microbatches=[]: give each one's rows"),
    ({"microbatches": [4, 24]}, "microbatches=[4, 24]: give each one's rows"),
    ({"microbatches": [[4, [24]]], "num_microbatches": 2}, "with num_microbatches=2: give one of the two"),
    ({"microbatches": [[4, [24]]], "slices": 8}, "microbatches=... with slices=8: give one of the two"),
    ({"microbatches": [[4, [24]]], "num_flushes": 2}, "with memory.num_flushes=2: give one of"),
    ({"microbatches": [[4, [24]]], "schedule": "auto"}, "which is planned for microbatches that are alike"),
    (
        {"microbatches": [[2, [24]], [2, [9, 15]]], "schedule": make_schedule("gpipe", 1, 2, 2)},
        "the schedule 'gpipe' has microbatches of [2, 2] slices. Give microbatches=... with as many, not [1, 2]",
    ),
    (
        {"schedule": make_schedule("gpipe", 1, 2, [1, 2]), "slices": [9, 15]},
        "the schedule 'gpipe' has microbatches of [1, 2] slices. Give microbatches=... with as many.",
    ),
]


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS, ids=[str(arguments)[:60] for arguments, _ in ARGUMENTS])
def test_an_argument(arguments: dict[str, Any], words: str) -> None:
    with refused(words):
        make_pipe(llama(), **arguments)


def ids(*lengths: int) -> list[Tensor]:
    return [torch.ones(length, dtype=torch.int64) for length in lengths]


def planned(lengths: tuple[int, ...] = (4, 6, 10), **changes: Any) -> dict[str, Any]:
    """Sequences of these lengths, and a plan for others, or one that is changed."""
    plan = StepPlan(((2, 0), (1,)), ((5, 9), (6,)), make_schedule("1f1b", 1, 2, [2, 1]))
    return {"inputs": batch_of([*lengths])[0], "plan": replace(plan, **changes)}


def shifted(tokens: Tensor) -> Tensor:
    """The labels of a loop whose model doesn't shift them: each the next token, none for the last."""
    return torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)


def changed_at(place: tuple[int, int], label: int) -> Tensor:
    labels = TOKENS.clone()
    labels[place] = label
    return labels


SHIFTED = "the labels are shifted already: each that counts is the next token"
SAME = make_schedule("gpipe", 1, 2, 4)
BATCHES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"targets": TOKENS[:2]}, "labels are (2, 32) int64, inputs (4, 32) int64: they must have one shape"),
    ({}, {"targets": TOKENS[:, 1:]}, "labels are (4, 31) int64, inputs (4, 32) int64"),
    ({}, {"inputs": TOKENS.float()}, "inputs are (4, 32) float32; expected token ids, (batch, sequence) int64"),
    ({}, {"targets": TOKENS.float()}, "labels are (4, 32) float32; expected token ids or -100, int64"),
    ({}, {"inputs": TOKENS[0]}, "inputs are (32,) int64; expected token ids"),
    ({}, {"inputs": TOKENS[:0]}, "the batch has no tokens: inputs are (0, 32)"),
    ({}, {"inputs": TOKENS + 61}, "inputs[0, 0] is 61, but the model has a vocabulary of 61 .. tokenizer the"),
    ({}, {"inputs": TOKENS - 1}, "inputs[0, 0] is -1, but the model has a vocabulary of 61 (ids 0 to 60)"),
    ({}, {"targets": changed_at((2, 7), 61)}, "labels[2, 7] is 61, but .. (-100 where a label counts nowhere"),
    ({}, {"targets": changed_at((3, 0), -1)}, "labels[3, 0] is -1, but .. Type labels = labels.masked_fill(labels < 0"),
    ({}, {"inputs": ids(3, 4), "targets": [*ids(3), torch.tensor([1, 1, 90, 1])]}, "labels[1][2] is 90, but the"),
    # labels that are shifted already
    ({}, {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}, f"{SHIFTED} .. type step(tokens, tokens)"),
    ({}, {"targets": shifted(TOKENS)}, SHIFTED),
    ({}, {"targets": shifted(TOKENS).index_fill(1, torch.arange(24), -100)}, SHIFTED),
    ({}, {"inputs": [*TOKENS], "targets": [*shifted(TOKENS)]}, SHIFTED),
    ({}, {"inputs": {"input_ids": TOKENS, "labels": shifted(TOKENS)}, "targets": None}, SHIFTED),
    ({}, {"lengths": [32, 20, 9, 9], "targets": shifted(TOKENS)}, SHIFTED),
    ({}, {"targets": TOKENS, "labels": TOKENS}, "labels=... and targets=..., two names of one"),
    (
        {},
        {"inputs": torch.cat([TOKENS] * 3, dim=1)},
        "the sequence has 96 tokens, but 'llama' has max_position_embeddings=64",
    ),
    ({}, {"inputs": TOKENS.numpy(), "targets": TOKENS}, "inputs are of type ndarray: give a tensor"),
    ({}, {"position_ids": TOKENS.numpy()}, "position_ids are of type ndarray: give a tensor."),
    ({}, {"document_ids": TOKENS.numpy()}, "document_ids are of type ndarray: give a tensor"),
    ({}, {"sequence_values": [0.5] * 4}, "sequence_values are of type list: give a tensor, (sequences, ...)"),
    ({}, {"position_ids": [*TOKENS]}, "position_ids are of type list: give a tensor."),
    ({}, {"targets": None}, "labels are missing: give step(inputs, labels)"),
    ({}, {"targets": torch.full_like(TOKENS, -100)}, "no label of this batch counts"),
    (
        {"loss_fn": lambda outputs, targets: (causal_cross_entropy(outputs, targets)[0], 1)},
        {},
        "loss_fn counted 1 tokens, but .. targets",
    ),
    ({"num_microbatches": 5}, {}, "a batch of 4 sequences can't be cut into 5 microbatches"),
    ({"slices": [14, 14]}, {}, "slices=[14, 14] add up to 28 tokens, but the sequence has 32 .. Add 4"),
    ({"slices": 99}, {}, "slices=99: a sequence of 32 tokens takes 1 to 32"),
    ({"microbatches": [[2, [16, 16]], [1, [32]]]}, {}, "have 3 rows, but the batch has 4. Make them equal"),
    ({"microbatches": [[2, [12, 11]], [2, [23]]]}, {}, "slices of 23 tokens in all, but it has rows of 32"),
    # sequences of different lengths
    ({}, {"inputs": ids(4, 0)}, "inputs[1] is an empty sequence. Leave it out."),
    ({}, {"inputs": []}, "inputs are a list without a sequence: give at least one, or leave the step out."),
    ({}, {"inputs": ids(1, 1)}, "no label of this batch counts: all are -100"),
    ({}, {"inputs": ids(4, LENGTH + 1)}, "the length of inputs[1]=65 is more than the model's 64 positio"),
    (
        {},
        {"inputs": ids(4, 3), "targets": ids(4, 4)},
        "labels[1] are (4,) int64, inputs[1] (3,) int64: they must have one shape",
    ),
    ({}, {"inputs": ids(4, 3), "targets": ids(4)}, "labels are 1 sequences, inputs 2"),
    ({}, {"inputs": [torch.ones(4)]}, "inputs[0] are (4,) float32; expected token ids, (tokens,) int64"),
    ({}, {"inputs": ids(4), "targets": torch.ones(1, 4)}, "labels must be a list of tensors"),
    ({}, {"lengths": [32, 33, 9, 9]}, "lengths[1]=33, but inputs have room for 32"),
    ({}, {"lengths": [32, 0, 9, 9]}, "inputs[1] is an empty sequence"),
    ({}, {"lengths": [32]}, "inputs are (4, 32) for 1 lengths"),
    ({}, {"inputs": ids(4, 3), "position_ids": torch.ones(2, 4)}, "position_ids with sequences of different lengths"),
    ({"slices": [2, 2]}, {"inputs": ids(4, 3)}, "slices=[...] with sequences of different lengths"),
    ({"microbatches": [[2, [4]]]}, {"inputs": ids(4, 3)}, "microbatches=... with sequences of different lengths"),
    ({"schedule": SAME}, {"inputs": ids(4)}, "a batch of 1 sequences can't be cut into 2 microbatches"),
    ({"schedule": SAME}, {"inputs": ids(4, 3)}, "slices=4: a sequence of 3 tokens takes 1 to 3"),
    # plans of a step
    ({}, {"plan": planned()["plan"]}, "plan=... is for sequences of different lengths"),
    ({}, planned((4, 7, 10)), "its sequences [1] have 7: it was made for other lengths. Make"),
    (
        {},
        planned(groups=((2, 0),), slices=((5, 9),)),
        "don't add up to the batch of 3 sequences: sequence 1 is in 0 of t",
    ),
    ({}, planned(groups=((2, 0), (1, 2))), "sequence 2 is in 2 of them, not in one"),
    ({}, planned(groups=((2, 0), (1, 3))), "there is no sequence 3"),
    ({}, planned(groups=((2, 0, 1), ())), "3 sequences: one is empty"),
    (
        {},
        planned(slices=((5, 8), (6,))),
        "cuts microbatch 0 into slices of [5, 8] tokens, 13 in all, but its sequences [2, 0]",
    ),
    ({}, planned(slices=((14, 0), (6,))), "microbatch 0 into slices of [14, 0] tokens"),
    ({}, planned(slices=((5, 9),)), "the plan has 2 microbatches, but slices of 1"),
    ({}, planned(slices=((5, 9), (3, 3))), "microbatches of [2, 2] slices, but its schedule '1f1b' of [2, 1]"),
    (
        {},
        planned(schedule=make_schedule("1f1b", 2, 2, [2, 1])),
        "the schedule '1f1b' is for 2 ranks, but there are 1",
    ),
    (
        {},
        planned(schedule=make_schedule("zb-v", 1, 2, [2, 1], 2)),
        "has its stages on the ranks [0, 0], but the pipeline",
    ),
]


@pytest.mark.parametrize(("arguments", "batch", "words"), BATCHES, ids=[words for _, _, words in BATCHES])
def test_a_batch(arguments: dict[str, Any], batch: dict[str, Any], words: str) -> None:
    pipe = make_pipe(llama(), **arguments)
    batch = {"inputs": TOKENS} | batch
    with refused(words):
        pipe.step(**{"targets": batch["inputs"]} | batch)
    assert all(parameter.grad is None for parameter in pipe.parameters())  # nothing ran


@pytest.mark.parametrize(
    ("tokens", "labels"),
    [
        (torch.ones_like(TOKENS), torch.ones_like(TOKENS)),
        (TOKENS[:1, :8], shifted(TOKENS[:1, :8])),
        (TOKENS, changed_at((1, 4), 0)),
    ],
    ids=["one token again and again", "fewer than eight labels", "unshifted"],
)
def test_labels_that_may_be_unshifted(tokens: Tensor, labels: Tensor) -> None:
    by_position = make_pipe(llama()).step(tokens, labels)
    assert torch.equal(by_position, make_pipe(llama()).step(tokens, targets=labels))


def with_another_part() -> Any:
    model = build(llama())
    model.model.layers[1].mlp = nn.Linear(32, 32, dtype=torch.float64)
    return model


def compiled() -> Any:
    model = build(llama())
    model.model.layers[2].mlp.compile()
    return model


def without_weights() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(llama())


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(9, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (lambda: nn.Linear(2, 2), {}, "model is a Linear; give a causal LM of transformers"),
        (without_weights, {}, "meta device .. Pipeline.from_config"),
        (
            compiled,
            {"schedule": "zb-h1", "num_ranks": 2},
            "model.layers.2.mlp is compiled .. schedule 'zb-h1' .. 1f1b",
        ),
        (with_another_part, {"num_ranks": 2, "partition": [1.5, 2.5]}, "mlp is a Linear, not a LlamaMLP"),
        (
            lambda: build(ARCHITECTURES["gpt_neox"]),  # both branches of a layer start from its input
            {"num_ranks": 2, "partition": [1.5, 2.5]},
            "'gpt_neox' can't be cut inside layer 0 (GPTNeoXLayer) .. whole numbers",
        ),
        (layers, {"microbatches": [[1, [2, 1]], [1, [3]]]}, "take whole microbatches. Put .. CutTokens"),
    ],
)
def test_a_model(make: Any, arguments: dict[str, Any], words: str) -> None:
    with refused(words):
        make_pipe(make(), **arguments)


def test_sequences_of_different_lengths_for_layers_that_take_whole_rows() -> None:
    with refused("layers of this nn.Sequential take whole microbatches"):
        make_pipe(layers()).step(ids(4, 3), ids(4, 3))


def test_an_unknown_argument_is_a_type_error() -> None:
    arguments: dict[str, Any] = {"loss": 1}
    with pytest.raises(TypeError, match="unexpected keyword argument 'loss'"):
        Pipeline(layers(), **arguments)


# --- by Python and by YAML --------------------------------------------------------------------------------------------


CONFIG: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"corpus": "python-stdlib"},
    "training": {"output": "out", "seq_len": 64, "batch_size": 6, "steps": 1},
    "parallel": {"data": 2},
}


@pytest.mark.parametrize(
    ("section", "option", "value", "words"),
    [
        ("memory", "recompute", "some", "memory.recompute='some': give 'none', 'selective'"),
        ("memory", "recompute", True, "memory.recompute=True"),
        ("memory", "offload", 1.5, "memory.offload=1.5: give a number from 0 to 1"),
        ("memory", "limit", 0, "memory.limit=0: give a number above 0"),
        ("memory", "limit", True, "memory.limit=True: give a number above 0"),
        ("memory", "num_flushes", 0, "memory.num_flushes=0"),
        ("memory", "recomput", "full", "unknown key memory.recomput; did you mean 'memory.recompute'?"),
        ("parallel", "tensor_plan", "colwise", "parallel.tensor_plan='colwise'"),
        ("parallel", "shrad", "optimizer", "did you mean 'parallel.shard'?"),
        ("runtime", "stall_limit", "soon", "runtime.stall_limit='soon'"),
    ],
)
def test_a_bad_value_is_refused_in_the_same_words(section: str, option: str, value: object, words: str) -> None:
    with pytest.raises(SlipstreamError) as in_python:
        RECORDS[section](**{option: value})
    with pytest.raises(SlipstreamError) as in_yaml:
        parse_config(CONFIG | {section: {option: value}})
    assert words in str(in_python.value)
    assert str(in_yaml.value).startswith(str(in_python.value))  # and may say what else is meant


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ({"recompute": 1}, "unknown key pipeline.recompute; did you mean 'memory.recompute'?"),
        ({"fused": 1}, "unknown key pipeline.fused; did you mean 'runtime.fused'?"),
        ({"gradient_checkpointing": 1}, "pipeline.gradient_checkpointing; did you mean 'memory.recompute'?"),
        ({"microbatches": [[2, [64]], [2, [32, 32]]]}, "have 4 rows, but a replica's batch has 3"),
        ({"microbatches": [[3, [32]]]}, "slices of 32 tokens in all, but training.seq_len has rows of 64"),
        ({"microbatches": [[3, [64]]], "slices": 8}, "pipeline.microbatches says what pipeline.slices does"),
        ({"microbatches": [[3, [64]]], "num_microbatches": 1}, "what pipeline.num_microbatches does; give one of"),
        ({"microbatches": [[3, [0, 64]]]}, "pipeline.microbatches[0][1][0]=0: give"),
    ],
)
def test_a_configuration(pipeline: dict[str, Any], words: str) -> None:
    with refused(words):
        parse_config(CONFIG | {"pipeline": pipeline})


def test_microbatches_of_a_configuration_are_read_back() -> None:
    config = parse_config(CONFIG | {"pipeline": {"microbatches": [[2, [40, 24]], [1, [64]]]}})
    options = config.pipeline_options()
    assert (options["microbatches"], options["slices"]) == ([(2, [40, 24]), (1, [64])], None)
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_a_dtype_is_given_by_itself_or_by_its_name() -> None:
    assert Precision(dtype=torch.bfloat16) == Precision(dtype="bfloat16")
