"""Cases of models, and of their adapters, that the processes of a group share."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from slipstream import SlipstreamError
from slipstream.model import IGNORED, LayerRange, causal_cross_entropy, find_anatomy, find_halves
from slipstream.model.adapted_modules import adapter_dropouts
from slipstream.model.cutting import keep_layers
from slipstream.model.hooks.crossing_tensors import with_hidden_states
from slipstream.model.module_copies import copy_with_shared_weights
from slipstream.parallel import RankGroup, check_tensor_parallel
from slipstream.parallel.tensor import vocabulary_cross_entropy
from support.architectures import BOUND, VOCABULARY, gradient_error, no_rounding_inside
from support.parallel.group_cases import by_name, run_cases
from support.parallel.shared_models import BATCH, CONFIGS, LENGTH, Shared, batch, whole_model, whole_step


def compare(name: str, group: RankGroup) -> None:
    """Loss and gradients are the whole model's: weight gradients by autograd, and in place and deferred."""
    whole = whole_model(name)
    inputs, labels = batch()
    expected_loss, expected = whole_step(whole, inputs, labels)
    for sequence in (False, True):
        for defers in (False, True):
            shared = Shared(whole, group, sequence)
            loss = shared.step(inputs, labels, defers)
            assert abs(loss - expected_loss) < BOUND, f"{name}, {sequence}, {defers}: the loss"
            error = gradient_error(expected, shared.gradients())
            assert error < BOUND, f"{name}, sequence={sequence}, defers={defers}: {error}"


def stages_share_what_is_left_of_a_model(group: RankGroup) -> None:
    """Two skeletons over the same shares, cut at or inside a layer, one row each: what goes from the first to the
    second is a rank's tokens, or all; the second doesn't embed."""
    inputs, labels = batch()
    inputs, labels = inputs[1:], labels[1:]
    for name, middle, sequence in (("gpt2", 0.5, True), ("gpt2", 1, False), ("llama, tied", 1, True)):
        whole = whole_model(name)
        _, expected = whole_step(whole, inputs, labels)
        anatomy = find_anatomy(whole.config)
        anatomy = replace(anatomy, halves=find_halves(whole.config, anatomy))
        shared = Shared(whole, group, sequence, installs=False)
        shared.parallel.begin(LENGTH)
        stages = [copy_with_shared_weights(shared.model) for _ in range(2)]
        sent: list[Tensor] = []
        for stage, owned in zip(stages, (LayerRange(0, middle), LayerRange(middle, 2)), strict=True):
            keep_layers(stage, anatomy, owned)
            shared.parallel.install(stage, lambda: None, lambda: None, is_first=owned.start == 0)
        first, second = (stage.get_submodule(anatomy.layers) for stage in stages)
        first[0].register_forward_hook(lambda _m, _a, out, sent=sent: sent.append(_first(out)))
        second[int(middle)].register_forward_pre_hook(
            lambda _m, args, kwargs, sent=sent: with_hidden_states(args, kwargs, sent[0]), with_kwargs=True
        )
        stages[0](input_ids=inputs, use_cache=False)
        group.calls.clear()
        logits = stages[1](input_ids=inputs, use_cache=False).logits
        if middle == 1:
            assert group.calls["all_reduce"] == (0 if sequence else 2)  # those of one layer, and no embedding's
        assert sent[0].shape == (1, shared.parallel.local_length(LENGTH), whole.config.hidden_size)
        loss = vocabulary_cross_entropy(group, shared.parallel.first_id, IGNORED)
        total, count = loss(logits[:, :-1], labels[:, 1:])
        (total / count).backward()
        assert gradient_error(expected, shared.gradients()) < BOUND, (name, sequence)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def each_rank_has_its_share(group: RankGroup) -> None:
    """Of what is cut 1/t, tied weights once; names stay."""
    whole = whole_model("llama, tied", vocab_size=64)
    shared = Shared(whole, group)
    assert [name for name, _ in shared.model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert shared.model.lm_head.weight is shared.model.model.embed_tokens.weight
    head_dim, keys = 8, 2
    for name, parameter in shared.model.named_parameters():
        assert parameter.shape == shared.parallel.share(name).take(whole.get_parameter(name)).shape
        parts = group.size if not name.endswith(("k_proj.weight", "v_proj.weight")) else min(group.size, keys)
        assert parameter.numel() * (1 if "norm" in name else parts) == whole.get_parameter(name).numel(), name
    attention = shared.model.model.layers[0].self_attn
    assert attention.k_proj.out_features == head_dim * max(1, keys // group.size)
    assert attention.num_key_value_groups == (2 if group.size == 2 else 1)
    bytes_here = sum(p.untyped_storage().nbytes() for p in shared.model.parameters())
    assert bytes_here == sum(p.nbytes for p in shared.model.parameters()), "a share keeps the whole's memory"


def two_all_reduces_a_layer_each_way(group: RankGroup) -> None:
    """PTD-P section 3.2: 8 b s h (t-1)/t elements a layer; all-reduces of a ring send 2 (t-1)/t of what they reduce."""
    whole, (inputs, _) = whole_model("llama"), batch(24)
    num_layers, size = whole.config.num_hidden_layers, BATCH * 24 * whole.config.hidden_size * 8
    for sequence in (False, True):
        shared = Shared(whole, group, sequence)
        group.calls.clear()
        group.payload.clear()
        shared.parallel.begin(24)
        hidden = shared.model.model(input_ids=inputs, use_cache=False).last_hidden_state
        forward, sent = group.calls.copy(), group.payload.copy()
        hidden.sum().backward()
        backward, received = group.calls - forward, group.payload - sent
        if not sequence:
            assert forward == {"all_reduce": 2 * num_layers + 1}  # and one of the embedding
            assert backward == {"all_reduce": 2 * num_layers}
            volume = 2 * (sent["all_reduce"] - size + received["all_reduce"])
            assert sent["all_reduce"] == (2 * num_layers + 1) * size
        else:
            assert forward == {"all_gather": 2 * num_layers + 1, "reduce_scatter": 2 * num_layers, "all_reduce": 1}
            assert backward == {"all_gather": 2 * num_layers + 1, "reduce_scatter": 2 * num_layers + 1}
            ends = 3 * size  # the gather before the head and its backward, the backward of the embedding's split
            volume = sent["all_gather"] + sent["reduce_scatter"] - ends
            volume += received["all_gather"] + received["reduce_scatter"]
        elements = volume * (group.size - 1) / group.size / 8
        assert elements == num_layers * 8 * BATCH * 24 * whole.config.hidden_size * (group.size - 1) / group.size


def the_loss_is_that_of_all_logits(group: RankGroup) -> None:
    """Alone: sizes that don't divide, ignored labels, lower precision, large logits; no rank sees another's."""
    generator = torch.Generator().manual_seed(group.size)
    whole = 30 * torch.randn(2, 9, VOCABULARY, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    labels[0, ::2] = -100
    start = sum(len(part) for part in torch.arange(VOCABULARY).tensor_split(group.size)[: group.rank])
    stop = start + len(torch.arange(VOCABULARY).tensor_split(group.size)[group.rank])
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        everything = whole.to(dtype, copy=True).requires_grad_()
        part = everything.detach()[..., start:stop].clone().requires_grad_()
        expected, count = causal_cross_entropy(everything, labels)
        found, found_count = vocabulary_cross_entropy(group, start, IGNORED)(part, labels)
        (3 * expected).backward()
        (3 * found).backward()
        assert found.dtype == expected.dtype
        assert abs(found - expected) < bound * expected
        assert count == found_count == (labels != -100).sum()
        gathered = group.gather(found.item())
        assert gathered == [found.item()] * group.size
        assert part.grad is not None
        assert everything.grad is not None
        assert part.grad.dtype == dtype
        allowed = 1e-2 if dtype == torch.bfloat16 else bound * 10
        assert (part.grad - everything.grad[..., start:stop]).abs().max() <= allowed * 3
    nothing = vocabulary_cross_entropy(group, start, IGNORED)(part, torch.full_like(labels, IGNORED))
    assert nothing == (0, 0)


class _Shapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.columns: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.dim():
                self.columns |= set(tensor.shape)
        return result


def no_rank_holds_all_logits(group: RankGroup) -> None:
    whole, (inputs, labels) = whole_model("llama, tied", vocab_size=67), batch()
    for sequence in (False, True):
        shared = Shared(whole, group, sequence)
        with _Shapes() as seen:
            shared.loss(inputs, labels).backward()
        assert 67 not in seen.columns
        assert shared.model.lm_head.weight.shape[0] in seen.columns
    with _Shapes() as seen:
        whole_step(whole, inputs, labels)
    assert 67 in seen.columns


def nothing_stays_of_a_forward(group: RankGroup) -> None:
    """Without gradients, and after one that was broken off inside a region, as a replay is; then all is as before."""
    whole, (inputs, labels) = whole_model("llama, biases"), batch()
    _, expected = whole_step(whole, inputs, labels)
    for sequence in (False, True):
        shared = Shared(whole, group, sequence)
        seen: list[weakref.ref[Tensor]] = []
        layer = shared.model.model.layers[1]
        noted = layer.mlp.register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(weakref.ref(args[0])))
        with torch.no_grad():
            shared.loss(inputs, labels)
        gc.collect()
        assert [reference() for reference in seen] == [None]
        noted.remove()
        for place in (layer.mlp.act_fn, layer.mlp.down_proj, layer.self_attn.o_proj):
            broken = place.register_forward_hook(_break_off)
            with pytest.raises(_BrokenOffError):
                shared.loss(inputs, labels)
            broken.remove()
        assert isinstance(layer.mlp.down_proj.bias, nn.Parameter)
        shared.loss(inputs, labels).backward()
        assert gradient_error(expected, shared.gradients()) < BOUND


class _BrokenOffError(Exception):
    pass


def _break_off(*_: Any) -> None:
    raise _BrokenOffError


def autocast(group: RankGroup) -> None:
    """Products in bfloat16, sums and norms wider: gradients differ from the whole model's by roundings alone."""
    for name in ("llama, biases", "gpt2", "mixtral"):
        torch.manual_seed(1)
        whole = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="sdpa").eval()
        inputs, labels = batch()
        exact_loss, exact = whole_step(whole, inputs, labels)
        with torch.autocast("cpu", torch.bfloat16):
            _, rounded = whole_step(whole, inputs, labels)
        for sequence in (False, True):
            shared = Shared(whole, group, sequence)
            with torch.autocast("cpu", torch.bfloat16):
                loss = shared.loss(inputs, labels)
                loss.backward()
            assert abs(loss - exact_loss) < 0.02
            found = shared.gradients()
            assert all(gradient.dtype == torch.float32 for gradient in found.values())
            errors = [_distance(found, exact), _distance(rounded, exact)]
            assert errors[0] < 3 * errors[1] < 0.3, f"{name}, sequence={sequence}: {errors}"


def _distance(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    squares = [((found[name] - gradient).square().sum(), gradient.square().sum()) for name, gradient in exact.items()]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)


def ranks_are_told_what_is_their_own(group: RankGroup) -> None:
    """Dropout that agrees where tensors do: with its random state switched, what ranks share stays equal."""
    events: list[str] = []
    whole = whole_model("llama")
    shared = Shared(whole, group, False, lambda: events.append("enter"), lambda: events.append("leave"))
    shared.loss(*batch())
    assert events == ["enter", "leave"] * 2 * whole.config.num_hidden_layers
    for name, expected in (("llama", []), ("mixtral", ["leave", "enter", "leave", "enter"])):
        events.clear()
        shared = Shared(whole_model(name), group, True, lambda: events.append("enter"), lambda: events.append("leave"))
        shared.loss(*batch())
        assert events == expected * whole.config.num_hidden_layers, events


def dropout_agrees_where_tensors_do(group: RankGroup) -> None:
    states: list[Tensor] = []

    def enter() -> None:
        states.append(torch.get_rng_state())
        torch.manual_seed(100 + group.rank)

    whole = whole_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    shared = Shared(whole, group, False, enter, lambda: torch.set_rng_state(states.pop()))
    shared.model.train()
    inputs, _ = batch()
    for switches in (True, False):
        if not switches:
            shared = Shared(whole, group)
            shared.model.train()
        torch.manual_seed(0 if switches else group.rank)
        hidden = shared.model.transformer(input_ids=inputs, use_cache=False).last_hidden_state
        agree = all(torch.equal(hidden, other) for other in group.gather(hidden.detach()))
        assert agree is switches


def toys_are_checked(group: RankGroup) -> None:
    """Plans that are right pass; wrong ones are refused on every rank, by the parameter that would be trained wrong."""
    for name in ("llama", "gpt2", "qwen2_moe, a dense layer", "phi3", "gemma2, tied, one key head"):
        for sequence in (False, True):
            check_tensor_parallel(CONFIGS[name], None, group, sequence)
    plan = {f"model.{key}": style for key, style in LlamaConfig.base_model_tp_plan.items()}
    with pytest.raises(SlipstreamError, match=r"'qwen3' can't be shared by \d tensor ranks: the gradient of .*q_norm"):
        check_tensor_parallel(CONFIGS["qwen3"], plan, group, False)
    check_tensor_parallel(
        CONFIGS["qwen3"],
        plan | {f"model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"},
        group,
        False,
    )
    with pytest.raises(SlipstreamError, match="'olmo2' can't be shared"):
        check_tensor_parallel(CONFIGS["olmo2"], plan, group, False)
    with pytest.raises(SlipstreamError, match=r"tensor_plan names 'model.layers.\*.mlp.up_porj'"):
        check_tensor_parallel(CONFIGS["llama"], plan | {"model.layers.*.mlp.up_porj": "colwise"}, group, False)


def a_plan_may_be_given(group: RankGroup) -> None:
    """Attention alone or MLP alone; what isn't named stays whole, and sees all tokens."""
    whole, (inputs, labels) = whole_model("llama, biases"), batch()
    _, expected = whole_step(whole, inputs, labels)
    for part in ("self_attn", "mlp"):
        plan = {f"model.{key}": style for key, style in LlamaConfig.base_model_tp_plan.items() if part in key}
        for sequence in (False, True):
            shared = Shared(whole, group, sequence, given=plan)
            shared.loss(inputs, labels).backward()
            assert gradient_error(expected, shared.gradients()) < BOUND, (part, sequence)
            whole_parts = [name for name in expected if shared.parallel.share(name).is_whole]
            assert any(part in name and "proj.weight" in name for name in whole_parts) is False


def layers_without_an_mlp_of_their_own(group: RankGroup) -> None:
    """OPT's layers hold two linear layers themselves, and flatten tokens before them: exact, or refused by name."""
    names = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "out_proj": "rowwise"}
    plan = {f"model.decoder.layers.*.self_attn.{name}": style for name, style in names.items()}
    plan |= {"model.decoder.layers.*.fc1": "colwise", "model.decoder.layers.*.fc2": "rowwise"}
    whole, (inputs, labels) = whole_model("opt"), batch()
    _, expected = whole_step(whole, inputs, labels)
    shared = Shared(whole, group, given=plan)
    shared.loss(inputs, labels).backward()
    assert gradient_error(expected, shared.gradients()) < BOUND
    with pytest.raises(SlipstreamError, match=r"layers.0.fc1 takes \(\d+, 32\).* Turn it off"):
        Shared(whole, group, sequence=True, given=plan).loss(inputs, labels)


_ROWS_TOO: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], "task_type": "CAUSAL_LM"}
_ENDS = ["lm_head", "embed_tokens"]


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes)


ADAPTERS = {  # by name: the model, and its adapter
    "all linear layers": ("llama", lora(use_rslora=True)),
    "DoRA": ("llama", lora(use_dora=True)),
    "DoRA of both ends": ("llama", lora(use_dora=True, target_modules=["o_proj", *_ENDS])),
    "both ends": ("llama", lora(target_modules=["q_proj", *_ENDS])),
    "trained copies": ("llama", lora(modules_to_save=[*_ENDS, "norm", "down_proj"], target_modules=["k_proj"])),
    "transposed and packed": ("gpt2", lora(target_modules=["c_attn", "c_proj"], bias="all", fan_in_fan_out=True)),
    "DoRA, transposed": ("gpt2", lora(target_modules=["c_attn", "c_proj"], use_dora=True, fan_in_fan_out=True)),
    "biases": (
        "starcoder2, biases",
        lora(bias="lora_only", modules_to_save=["c_proj"], target_modules=["q_proj", "o_proj"]),
    ),
    "biases of columns": ("starcoder2, biases", lora(lora_bias=True, target_modules=["q_proj", "c_fc"])),
    "beside experts": ("qwen2_moe, a dense layer", lora()),
    "norms of heads": ("qwen3_moe", lora(target_modules=["q_proj", "k_proj", "o_proj"])),
    "IA3": ("llama", peft.IA3Config(feedforward_modules=["down_proj", "q_proj"], **_ROWS_TOO)),
    "LoHa": ("llama", peft.LoHaConfig(r=4, **_ROWS_TOO)),
}


def adapted(model: PreTrainedModel, config: peft.PeftConfig) -> PreTrainedModel:
    """The model with an adapter whose weights are all drawn."""
    inside: PreTrainedModel = peft.get_peft_model(model, config, autocast_adapter_dtype=False).get_base_model().double()
    generator = torch.Generator().manual_seed(1)
    for parameter in inside.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return inside


def compare_adapted(name: str, group: RankGroup) -> None:
    """Loss and gradients are the whole model's, over tokens that all ranks have or that are spread, and with weight
    gradients that wait."""
    of, config = ADAPTERS[name]
    whole = adapted(whole_model(of), config)
    inputs, labels = batch()
    expected_loss, expected = whole_step(whole, inputs, labels)
    for sequence, defers in ((False, False), (False, True), (True, True)):
        shared = Shared(whole, group, sequence)
        loss = shared.step(inputs, labels, defers)
        assert abs(loss - expected_loss) < BOUND, f"{name}, {sequence}, {defers}: the loss"
        found = shared.gradients()
        assert found.keys() == expected.keys()
        error = gradient_error(expected, found)
        assert error < BOUND, f"{name}, sequence={sequence}, defers={defers}: {error}"


def what_cannot_be_cut_is_refused(group: RankGroup) -> None:
    for of, config, said in (
        ("qwen3_moe", lora(), "tensor ranks share these experts, whose adapter they can't"),
        ("gpt2", lora(lora_bias=True, target_modules=["c_proj"], fan_in_fan_out=True), "would add the bias of"),
        ("llama", lora(target_modules=["q_proj"], modules_to_save=["mlp"]), "name those parts instead"),
        ("starcoder2, biases", peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[]), "IA3 scales"),
    ):
        with pytest.raises(SlipstreamError, match=said):
            Shared(adapted(whole_model(of), config), group)


def dropout_is_that_of_the_whole_input(group: RankGroup) -> None:
    """A column's dropout, of an input that all ranks have, is equal on all; a row's, of each rank's features, isn't."""
    whole = adapted(whole_model("llama"), lora(lora_dropout=0.5))
    for sequence in (False, True):
        number = [0]

        def seed(rank: int, number: list[int] = number) -> None:
            number[0] += 1
            torch.manual_seed(1000 * number[0] + rank)

        shared = Shared(whole, group, sequence, lambda: seed(group.rank), lambda: seed(99))
        shared.model.train()
        dropped: dict[str, Tensor] = {}
        for name, module in shared.model.named_modules():
            for dropout in adapter_dropouts(module):
                dropout.register_forward_hook(_keep(dropped, name))
        torch.manual_seed(group.rank)
        shared.loss(*batch())
        assert len(dropped) == 7 * 2
        for name, mine in dropped.items():
            agree = all(torch.equal(mine, other) for other in group.gather(mine))
            assert agree is not name.endswith(("o_proj", "down_proj")), (name, sequence)


def _keep(dropped: dict[str, Tensor], name: str) -> Any:
    def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
        dropped[name] = output.detach() == 0

    return keep


CASES = by_name(
    layers_without_an_mlp_of_their_own,
    stages_share_what_is_left_of_a_model,
    each_rank_has_its_share,
    two_all_reduces_a_layer_each_way,
    the_loss_is_that_of_all_logits,
    no_rank_holds_all_logits,
    nothing_stays_of_a_forward,
    autocast,
    ranks_are_told_what_is_their_own,
    dropout_agrees_where_tensors_do,
    toys_are_checked,
    a_plan_may_be_given,
) | {name: partial(compare, name) for name in CONFIGS}
CASES |= {f"adapter: {name}": partial(compare_adapted, name) for name in ADAPTERS}
CASES |= by_name(dropout_is_that_of_the_whole_input, what_cannot_be_cut_is_refused)
ROUNDING = ("autocast", "the_loss_is_that_of_all_logits")  # they are about lower precisions


def run_case(name: str) -> None:
    group = RankGroup(dist.group.WORLD)
    if name in ROUNDING:
        CASES[name](group)
    else:
        with no_rounding_inside():
            CASES[name](group)


if __name__ == "__main__":
    run_cases({name: partial(run_case, name) for name in CASES}, sys.argv[1:])
