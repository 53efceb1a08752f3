"""Recomputation changes no number; added gradients reach no other; a failed step leaves nothing to the next."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slipstream import Layers, Op, Pipeline, Runtime, SlipstreamError, gpipe, make_schedule, split_backwards
from slipstream.attention import ContextStore
from slipstream.model import Tensors, causal_cross_entropy, storage_id
from slipstream.model.autograd_memory import RecomputationError, RecomputePolicy, SavedTensors, SliceReplay
from slipstream.profile.stage_bench import memory_meter, tensors_alive
from slipstream.schedule import Schedule
from slipstream.simulator import memory_of
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    llama,
    no_rounding_inside,
    tokens,
    unsplit_step,
    with_dropout,
)
from support.live_memory import LiveMemory, held_after_three_slices
from support.parameters import each_once, first_of
from support.pipelines import make_pipe

KINDS = ("selective", "full", "stage", "stage+full", 1)
WITH_ACTIONS = ("selective", "stage", "stage+full")
SLICES = [5, 30, 17, 12]
WHOLE = RecomputePolicy(by_stage=True)
PRODUCTS = RecomputePolicy(keeps_products=True)


def step(model: nn.Module, recompute: str | int, **settings: object) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    settings = {"schedule": "1f1b", "slices": SLICES, "num_microbatches": 2, "num_ranks": 2} | settings
    pipe = make_pipe(copy.deepcopy(model), recompute=recompute, **settings)
    inputs = tokens(batch=4)
    loss = pipe.step(inputs, labels_of(inputs))
    assert any(span.action.op is Op.R for span in pipe.timeline().spans) == (recompute in WITH_ACTIONS)
    return loss, gradients(pipe)


def test_a_layer_that_does_not_repeat_itself_is_named() -> None:
    """Its outputs are compared: it would give wrong gradients."""
    model = build(ARCHITECTURES["llama"])
    part = model.get_submodule("model.layers.1.mlp")
    part.register_forward_hook(lambda _, args, output: output * (1 + random.random()))
    for kind in ("full", "stage"):
        with pytest.raises(SlipstreamError, match=r"^layer 1.*: the output differs when it is computed again"):
            step(model, kind, schedule="gpipe")
        step(model, kind, schedule="gpipe", check_recompute=False)


@pytest.mark.parametrize(
    "name", [*first_of(["llama, tied", "gpt2", "gpt_oss"]), *first_of(["qwen2_moe", "llama", "gemma3"], 0, "grid")]
)
def test_gradients_are_those_of_the_unsplit_model(name: str) -> None:
    with no_rounding_inside():
        model, inputs = build(ARCHITECTURES[name]), tokens(batch=4)
        whole = copy.deepcopy(model)
        loss = unsplit_step(whole, inputs, labels_of(inputs))
        for recompute in KINDS:
            found = step(model, recompute)
            assert abs(found[0] - loss) < BOUND
            assert gradient_error(gradients(whole), found[1]) < BOUND


def assert_same_bits(model: nn.Module, *kinds: str | int, **settings: object) -> dict[str, Tensor]:
    """Compares with a step that recomputes nothing, whose gradients it returns."""
    loss, expected = step(model, "none", **settings)
    for recompute in kinds:
        found_loss, found = step(model, recompute, **settings)
        assert found_loss == loss
        assert found.keys() == expected.keys()
        assert [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)] == []
    return expected


@pytest.mark.parametrize(
    ("name", "schedule", "num_stages"),
    [*first_of([("mixtral", "gpipe", 1)], 0), *first_of([("llama", "1f1b", 3)], 0, "grid")],
)
def test_nothing_changes_to_the_bit(name: str, schedule: str, num_stages: int) -> None:
    """In float32, whose rounding depends on the order of every sum."""
    settings = {"schedule": schedule, "num_ranks": num_stages, "partition": [1] * (num_stages - 1) + [5 - num_stages]}
    assert_same_bits(build(ARCHITECTURES[name]).float(), *KINDS, **settings)


def test_dropout_is_replayed() -> None:
    assert_same_bits(build(with_dropout("gpt2", 0.3)), "selective", "stage+full")
    random_state = torch.get_rng_state()  # the caller's: `step` seeds it and nothing else
    assert torch.equal(torch.manual_seed(7).get_state(), random_state)


@pytest.mark.more
def test_autocast_is_the_same() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(build(ARCHITECTURES["llama"]).float(), *KINDS)


@pytest.mark.more
def test_frozen_parameters() -> None:
    model = build(ARCHITECTURES["llama"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3" in name or "layers.2" in name)
    trained = assert_same_bits(model, *KINDS, num_ranks=4)
    assert all("layers.3" in name or "layers.2" in name for name in trained)


def test_a_number_of_layers_runs_no_other_again() -> None:
    pipe = make_pipe(build(llama()), "gpipe", slices=3, recompute=2)
    runs = [0] * 4
    for index, layer in enumerate(pipe._runtime.stages[0].model.model.layers):

        def count(*_: object, index: int = index) -> None:
            runs[index] += 1

        layer.register_forward_pre_hook(count)
    pipe.step(tokens(), tokens())
    assert runs == [3, 3, 3, 3]  # hooks of a layer run once


def peak_of(run: Callable[[], object], model: nn.Module | Pipeline) -> int:
    """The most bytes of tensors that a step holds beside what there was before, gradients included."""
    run()
    for parameter in model.parameters():
        parameter.grad = None
    with memory_meter(torch.device("cpu"), tensors_alive()) as memory:
        before = memory.num_bytes
        run()
        return memory.peak - before


@pytest.mark.more
def test_no_more_is_held_than_by_transformers() -> None:
    """One sequence on one device, beside `gradient_checkpointing_enable()`: whole, and in slices, which are short."""
    config = llama(num_hidden_layers=6, hidden_size=64, intermediate_size=192, max_position_embeddings=192)
    model, ids = build(config), tokens(batch=1, length=192)
    theirs = copy.deepcopy(model).train()
    theirs.set_attn_implementation("sdpa")
    plain = peak_of(lambda: unsplit_step(theirs, ids, labels_of(ids)), theirs)
    # whose name is another one in later versions
    getattr(theirs, "activation_checkpointing_enable", theirs.gradient_checkpointing_enable)()
    most = peak_of(lambda: unsplit_step(theirs, ids, labels_of(ids)), theirs)
    assert most < 0.5 * plain  # it does what it is for
    for slices in ([192], [20, 100, 72]):
        pipe = make_pipe(copy.deepcopy(model), slices=slices, recompute="full")
        held = peak_of(lambda pipe=pipe: pipe.step(ids, labels_of(ids)), pipe)  # type: ignore[misc]
        assert held <= most
        # norms round to float32; without that, which transformers' backward can't leave out, see above
        assert gradient_error(gradients(theirs), gradients(pipe)) < 1e-7


@pytest.mark.more
def test_a_backward_stays_whole_as_w_would_hold_what_all_layers_recompute() -> None:
    """By the account: of the last rank, whose backwards are split without recomputation of layers."""
    config, most = llama(num_hidden_layers=6, intermediate_size=192, max_position_embeddings=96), {}
    orders = {"whole": "1f1b", "split": split_backwards(make_schedule("1f1b", 2, 2, 1))}
    for name, order in orders.items():
        for recompute in ("none", "full"):
            options: dict[str, Any] = {"recompute": recompute, "num_microbatches": 2, "slices": 1}
            if name == "whole":
                options |= {"num_ranks": 2, "partition": [3, 3]}
            pipe, ids = make_pipe(build(config), order, **options), tokens(batch=2, length=96)
            training = pipe.layout.training
            assert (Op.I in training.ops) == (name == "split" or recompute == "none")
            most[name, recompute] = memory_of(training, pipe.memory_table(ids, ids))[1].peak
    assert most["whole", "full"] < 0.7 * most["split", "full"] < 0.8 * most["whole", "none"]


def test_a_layer_reads_the_modes_that_surround_the_step() -> None:
    """As of a default device: PyTorch leaves a backward without them."""

    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **kwargs or {})
            return found * 2 if func is nn.functional.silu else found

    model = build(ARCHITECTURES["llama"])
    with Doubled():
        assert_same_bits(model, "full")


def live_bytes(recompute: str | int) -> tuple[int, int]:
    """While three of four slices are forward on a single stage: bytes alive, and those of keys and values."""
    config = llama(num_key_value_heads=1, intermediate_size=96, vocab_size=512)
    model = build(config).float()
    pipe = make_pipe(model, "gpipe", slices=4, recompute=recompute)
    return held_after_three_slices(pipe, tokens(batch=4))[:2]


@pytest.mark.more
def test_less_is_held_between_forward_and_recomputation() -> None:
    """By independent count of everything alive. Full keeps the keys and values; selective what products returned."""
    (none, context), (selective, _) = live_bytes("none"), live_bytes("selective")
    (one, _), (three, _), (full, _), (stage, _) = map(live_bytes, (1, 3, "full", "stage"))
    assert none > 1.4 * selective > 1.4 * 1.4 * stage
    assert none > one > three > full > stage
    batch = 4 * 64 * 8  # one tensor of token ids
    assert stage < context + 8 * batch
    layers = (none - one), (one - three) / 2
    assert abs(layers[0] - layers[1]) < 0.1 * layers[0]  # every layer the same


def test_bytes_held_are_known() -> None:
    """What SavedTensors says it holds is what is freed with it."""
    weight = torch.randn(64, 64, requires_grad=True)
    memory, saved = LiveMemory(besides=[weight]), SavedTensors({storage_id(weight)})
    with memory:
        x = torch.randn(16, 64)
        with saved.saving(lambda tensor: True):
            output = ((x @ weight).tanh() @ weight).exp()  # exp saves its own output: no cycle may come of it
        kept = 16 * 64 * 4
        assert saved.num_bytes == 3 * kept  # x, tanh's result, exp's result
        del x, output
        assert saved.num_bytes == 0
        assert memory.num_bytes == 0


def forward_and_replay(run: Callable[[Tensor], Tensor], what: RecomputePolicy) -> tuple[Tensor, Tensor]:
    """The gradient of a plain run's input, and that after replaying it."""
    expected = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    run(expected).sum().backward()
    hidden = expected.detach().clone().requires_grad_()
    replay, store = SliceReplay(SavedTensors(set()), what, (hidden,)), ContextStore(3)
    with replay.forward(store):
        output = run(hidden)
    begun = list[Tensor]()

    def again(inputs: Tensors) -> Tensors:
        begun.append(inputs[0].requires_grad_())
        return (run(*begun),)

    outputs = replay.replay(again, store)
    assert (outputs is not None) == what.repeats_graph
    (output if outputs is None else outputs[0]).sum().backward()
    return expected.grad, (hidden if outputs is None else begun[0]).grad


@pytest.mark.parametrize("what", [WHOLE, PRODUCTS])
def test_a_product_changed_in_place_is_computed_again(what: RecomputePolicy) -> None:
    weight = torch.randn(4, 4, dtype=torch.float32)

    def run(hidden: Tensor) -> Tensor:
        product = hidden @ weight
        product += 1
        product.mul_(hidden)
        return (product @ weight).sigmoid() * torch.baddbmm(hidden[None], hidden[None], weight[None])[0].tanh()

    expected, found = forward_and_replay(run, what)
    assert torch.equal(expected, found)


def test_selective_runs_no_product_twice() -> None:
    count = 0

    class Count(LiveMemory):
        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            nonlocal count
            count += func is torch.ops.aten.mm.default
            return super().__torch_dispatch__(func, types, args, kwargs)

    weight = torch.randn(4, 4)
    for what, expected in ((PRODUCTS, 0), (WHOLE, 2)):
        hidden = torch.randn(3, 4, requires_grad=True)
        replay, store = SliceReplay(SavedTensors(set()), what, (hidden,)), ContextStore(3)

        def run(hidden: Tensor) -> Tensor:
            return ((hidden @ weight).tanh() @ weight).sigmoid().exp()

        with replay.forward(store):
            run(hidden)
        count = 0
        with Count():
            replay.replay(lambda inputs: (run(inputs[0].requires_grad_()),), store)
        assert count == expected


def test_a_model_that_does_not_repeat_itself_is_found_out() -> None:
    widths = iter([4, 4, 3])

    def run(hidden: Tensor) -> Tensor:
        return hidden[:, : next(widths)].exp().sin()

    with pytest.raises(RecomputationError, match=r"a forward saved \(3, 4\), its recomputation \(3, 3\)"):
        forward_and_replay(run, PRODUCTS)
    lengths = iter([3, 3, 1])

    def shorter(hidden: Tensor) -> Tensor:
        for _ in range(next(lengths)):
            hidden = hidden.exp()
        return hidden

    with pytest.raises(RecomputationError, match="a forward saved 3 tensors or more, its recomputation 1"):
        forward_and_replay(shorter, PRODUCTS)


def test_backward_without_recomputation_is_named() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    replay, store = SliceReplay(SavedTensors(set()), WHOLE, (hidden,)), ContextStore(3)
    with replay.forward(store):
        output = hidden.exp().sum()
    with pytest.raises(RecomputationError, match="before what its forward dropped is recomputed"):
        output.backward()


def test_a_schedule_may_bring_its_own_recomputation() -> None:
    given = gpipe(1, 1, 2)
    schedule = Schedule.parse(str(given).replace("0B0.0", "0R0.0 0B0.0"))
    pipe = make_pipe(build(llama()), schedule, slices=2, recompute="stage")
    pipe.step(tokens(), tokens())
    assert [str(span.action) for span in pipe.timeline().spans] == ["0F0.0", "0F0.1", "0B0.1", "0R0.0", "0B0.0"]


TOKENS, WIDTH = 3, 4
Table = Callable[[nn.Parameter], Tensor]
TABLES = {
    "as it is": lambda table: table,
    "viewed": lambda table: table.view(TOKENS * WIDTH).view(1, TOKENS, WIDTH),
    "of its own dtype": lambda table: table.double().view_as(table),
}


class WithTables(nn.Module):
    """Adds parameters of a row's own shape: autograd may leave them the very gradient of what they are added to, and
    adds the next ones to it in place."""

    def __init__(self, read: Table, is_first: bool, count: int) -> None:
        super().__init__()
        self.linear, self.read, self.is_first = nn.Linear(WIDTH, WIDTH), read, is_first
        self.tables = nn.ParameterList(torch.randn(1, TOKENS, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.is_first else self.linear(x)
        for table in self.tables:
            x = x + self.read(table)
        return torch.tanh(self.linear(x) if self.is_first else x)


def squares(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return ((output - targets) ** 2).sum(), torch.tensor(targets.shape[0])


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize(("is_first", "count"), [(True, 1), (False, 1), (False, 2)], ids=["input", "product", "two"])
@pytest.mark.parametrize("read", TABLES.values(), ids=TABLES)
def test_gradients_added_in_place_reach_no_other(
    read: Table, is_first: bool, count: int, schedule: str, stages_per_rank: int
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(WithTables(read, is_first, count) for _ in range(4))).double()
    whole = copy.deepcopy(layers)
    inputs, targets = torch.randn(2, 4, TOKENS, WIDTH, dtype=torch.float64)
    settings: dict[str, Any] = {"num_microbatches": 4, "num_ranks": 2, "stages_per_rank": stages_per_rank}
    settings |= {"loss_fn": squares, "layers": Layers(example=inputs), "runtime": Runtime(self_check=False)}
    pipe = Pipeline(layers, schedule, **settings)
    pipe.step(inputs, targets)
    (squares(whole(inputs), targets)[0] / len(inputs)).backward()
    assert gradient_error(whole, pipe) < BOUND


@pytest.mark.parametrize(("num_before", "name"), each_once([2, 5, 0], ["llama", "llama, tied"], 1))
def test_the_next_step_is_that_of_a_fresh_pipeline(name: str, num_before: int) -> None:
    """The loss function raises after some slices, while messages of others are on their way."""
    left = 1000

    def breaking(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal left
        left -= 1
        if left == -1:
            raise RuntimeError("no loss")
        return causal_cross_entropy(outputs, targets)

    def make(**settings: object) -> Pipeline:
        return make_pipe(ARCHITECTURES[name], num_ranks=2, num_microbatches=2, slices=4, **settings)

    torch.manual_seed(0)
    pipe, fresh = make(loss_fn=breaking), make()
    for each in (pipe, fresh):
        each.step(tokens(), tokens())  # the first tries a given loss function, too
        for parameter in each.parameters():
            parameter.grad = None
    left = num_before
    with pytest.raises(RuntimeError, match="no loss"):
        pipe.step(tokens(), tokens())
    for parameter in pipe.parameters():
        parameter.grad = None
    inputs = tokens(seed=1)
    assert torch.equal(pipe.step(inputs, inputs), fresh.step(inputs, inputs))
    found, wanted = dict(pipe.named_parameters()), dict(fresh.named_parameters())
    for key, parameter in wanted.items():
        assert parameter.grad is not None
        assert torch.equal(found[key].grad, parameter.grad), key
