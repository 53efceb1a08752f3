"""What people write as layers of an nn.Sequential: each as a case, with what a pipeline makes of it.

A case's layers stand between others, from (rows, tokens, WIDTH) to the same:

    Linear, CutTokens, <the case's layers>, Linear, Classes
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from slipstream import CutTokens, Skip, causal_attention

ROWS, TOKENS, WIDTH = 5, 24, 6

EXACT = "exact"  # the gradients of the unsplit model on the whole batch
BY_MICROBATCH = "by microbatch"  # those of the unsplit model on one microbatch after the other, as the page says
DIFFERS = "differs"  # others, as the page says


class Classes(nn.Module):
    """(b, T, classes) -> (b, classes, T), as the default loss takes them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Apply(nn.Module):
    """A function of a Linear's output."""

    def __init__(self, function: Callable[..., Any], *, linear: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH) if linear else nn.Identity()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


class With(nn.Module):
    """A function of the module itself and its input, with attributes, parameters and buffers as given."""

    def __init__(self, function: Callable[..., Any], **attributes: object) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            if isinstance(value, Tensor) and name.startswith("buffer"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def changed(module: nn.Module, *changes: Callable[[Any], object]) -> nn.Module:
    for change in changes:
        change(module)
    return module


def doubled_forward(module: nn.Module) -> None:
    """Sets a forward on the instance, as wrappers do."""
    original = module.forward
    module.forward = wraps(original)(lambda *args: original(*args) * 2)  # type: ignore[method-assign]


def _plus(value: Any, number: float = 1.0) -> Any:
    return tuple(each + number for each in value) if isinstance(value, tuple) else value + number


def forward_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, output: _plus(output))


def pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: tuple(map(_plus, args)))


def backward_hook(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda _, into, out: tuple(g * 2 for g in into))


def backward_pre_hook(module: nn.Module) -> None:
    module.register_full_backward_pre_hook(lambda _, out: tuple(g * 2 for g in out))


def nested() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


class DoubledCall(nn.Sequential):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


class Reversed(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed(self._modules.values())


class AlwaysEvaluates(nn.Sequential):
    """As those who freeze norms or dropout write it."""

    def train(self, mode: bool = True) -> nn.Sequential:
        return super().train(False)


class Named(nn.Sequential):
    """Has a constructor of its own, and nothing else."""

    def __init__(self) -> None:
        super().__init__(linear(), nn.Tanh())


def _scaled_by_its_own(module: nn.Sequential) -> None:
    module.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    module.register_buffer("shift", torch.tensor(0.5))
    module.register_forward_hook(lambda self, args, output: output * self.scale + self.shift)


def _owns_a_parameter(module: nn.Sequential) -> None:
    module.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    linear_0 = module[0]
    assert isinstance(linear_0, nn.Linear)
    linear_0.register_forward_hook(partial(_times, module))


def _times(owner: nn.Module, _: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * owner.scale


class ChangesBuffer(nn.Module):
    """Changes a buffer in training, in one of several ways."""

    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.change, self.linear = change, linear()
        self.register_buffer("scale", torch.ones(()))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change(self)
        return self.linear(x).tanh() * self.scale * self.gain


def _clamp_gain(module: Any) -> None:
    with torch.no_grad():
        module.gain.mul_(1.1)


class ExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    def get_extra_state(self) -> object:
        return {"version": 3}

    def set_extra_state(self, state: object) -> None:
        pass


def _counts(module: Any, x: Tensor) -> Tensor:
    module.count += 1
    return module.linear(x).tanh() * module.count  # type: ignore[no-any-return]


def _less_its_mean(module: Any, x: Tensor) -> Tensor:
    """Keeps a moving mean in a tensor that is no buffer."""
    x = module.linear(x)
    module.mean = 0.9 * module.mean + 0.1 * x.detach().mean()
    return (x - module.mean).tanh()


def _with_noise(module: Any, x: Tensor) -> Tensor:
    noise = torch.rand(x.shape, generator=module.generator, dtype=torch.float64)
    return module.linear(x).tanh() * noise  # type: ignore[no-any-return]


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(linear())  # type: ignore[no-untyped-call,no-any-return]


def _convolved(module: Any, x: Tensor) -> Tensor:
    return x + module.gate * module.convolution(functional.pad(x, (0, 0, 2, 0)).mT).mT  # type: ignore[no-any-return]


def _attends(module: Any, x: Tensor) -> Tensor:
    query, key, value = module.inwards(x).chunk(3, -1)
    found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return x + module.outwards(found)  # type: ignore[no-any-return]


def _from_zero(module: nn.Module) -> nn.Module:
    """With weights of zero, as residual branches are often initialised."""
    return changed(
        module, *[lambda m, name=name: nn.init.zeros_(getattr(m, name)) for name in dict(module.named_parameters())]
    )


def look_back(x: Tensor, distance: int = 16) -> Tensor:
    return x + functional.pad(x, (0, 0, distance, 0))[:, : x.shape[1]]


def mixes_in_training(module: nn.Module, x: Tensor) -> Tensor:
    return look_back(x, 1) if module.training else x


def mean_of_blocks(x: Tensor) -> Tensor:
    """Averages over blocks of four tokens."""
    if x.shape[1] % 4:
        return x
    return x + x.unflatten(1, (-1, 4)).mean(2, keepdim=True).expand(-1, -1, 4, -1).flatten(1, 2)


class NormedGradient(torch.autograd.Function):
    """Returns its input; its gradient is divided by its norm over all tokens of a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / gradient.norm(dim=(1, 2), keepdim=True)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


def _attends_to_all(module: Any, x: Tensor) -> Tensor:
    query, key, value = module.inwards(x)[:, None].chunk(3, -1)
    return x + causal_attention(query, key, value)[:, 0]


def _adds_inner_gradient(module: Any, x: Tensor, with_weights: bool = False) -> Any:
    """The gradient of an energy of the input, and of its weights."""
    with torch.enable_grad():
        inner = x if x.requires_grad else x.detach().requires_grad_()
        wanted = [inner, *(module.energy.parameters() if with_weights else ())]
        found = torch.autograd.grad(module.energy(inner).sum(), wanted, create_graph=True)
    return x + found[0] + sum(g.square().sum() * 1e-3 for g in found[1:])


def _adds_gradient_as_a_number(module: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        inner = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(module.energy(inner).tanh().sum(), inner)
    return module.energy(x) + gradient


def _energy() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), nn.Linear(WIDTH, 1))


def _with_doubled_weights(module: Any, x: Tensor) -> Any:
    doubled = {name: 2 * parameter for name, parameter in module.linear.named_parameters()}
    return torch.func.functional_call(module.linear, doubled, (x,))


def _derivative(module: Any, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own
        return sum(torch.func.jvp(lambda each: module.linear(each).tanh(), (x,), (torch.ones_like(x),)))


def _adds_gradient(module: Any, x: Tensor) -> Any:
    return x + torch.func.grad(lambda y: module.linear(y).tanh().sum())(x)


def _adds_product(module: Any, x: Tensor) -> Any:
    output, pull_back = torch.func.vjp(lambda y: module.linear(y).tanh(), x)
    return output + pull_back(output)[0]


def _adds_jacobian(module: Any, x: Tensor) -> Any:
    of_token = torch.func.jacrev(lambda token: module.linear(token[None])[0].tanh())
    return x + torch.func.vmap(of_token)(x.flatten(0, 1)).sum(1).view_as(x)


def _adds_curvature(module: Any, x: Tensor) -> Any:
    of_token = torch.func.hessian(lambda token: module.linear(token[None]).tanh().sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own
        return x + torch.func.vmap(of_token)(x.flatten(0, 1)).sum(1).view_as(x)


def _adds_weight_gradient(module: Any, x: Tensor) -> Any:
    """As a layer does that takes a step of its own in its forward."""
    weights = dict(module.linear.named_parameters())
    found = torch.func.grad(lambda given: torch.func.functional_call(module.linear, given, (x,)).tanh().mean())(weights)
    return torch.func.functional_call(module.linear, {name: w - found[name] for name, w in weights.items()}, (x,))


class OfIds(nn.Module):
    """Adds embeddings of ids that follow from the values."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, WIDTH, **given)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embed((x[..., 0] > 0).long())


def hands_on(make: Callable[[Tensor], Tensor]) -> Apply:
    """Adds a second tensor of another kind."""
    return Apply(lambda x: (x, make(x)), linear=False)


def takes_in(use: Callable[[Tensor, Tensor], Tensor]) -> Apply:
    return Apply(lambda inputs: use(*inputs), linear=False)


class ReadsFrom(nn.Module):
    """Uses another layer, of which it isn't the parent."""

    def __init__(self, other: nn.Module, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.others, self.read = [other], read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.others[0], x)


def _leaves(module: Any, x: Tensor) -> Tensor:
    """Leaves its output where another layer may find it."""
    module.output = module.linear(x)
    return module.output  # type: ignore[no-any-return]


def leaves() -> With:
    return With(_leaves, linear=linear(), output=None)


def holds(table: Tensor) -> With:
    """Uses a buffer that it may share."""
    return With(lambda m, x: m.linear(x) * m.buffer_table, linear=linear(), buffer_table=table)


def _table() -> Tensor:
    return torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64)


class Ternary(nn.BatchNorm1d):
    """A batch norm of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def _skip(make: Callable[[Skip], list[nn.Module]]) -> list[nn.Module]:
    return make(Skip("s"))


def _halves(x: Tensor, y: Tensor) -> Tensor:
    return x + y.to(x.dtype)


def _shared_layers(kind: str) -> list[nn.Module]:
    table = _table()
    if kind == "buffer":
        return [holds(table), nn.Tanh(), holds(table)]
    shared = With(lambda m, x: x * m.buffer_table, buffer_table=table)
    first, second = (With(lambda m, x: m.shared(m.linear(x)), linear=linear(), shared=shared) for _ in range(2))
    return [first, nn.Tanh(), second]


def _tied() -> list[nn.Module]:
    first, second = linear(), linear()
    second.weight = first.weight
    return [first, nn.Tanh(), second]


def _reading(read: Callable[[Any, Tensor], Tensor], make: Callable[[], nn.Module] = linear) -> list[nn.Module]:
    first = make()
    return [first, nn.Tanh(), ReadsFrom(first, read)]


def _parameter_hook(hook: Callable[[Tensor], Tensor], module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.register_hook(hook)


def _hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x


def _counts_its_accumulations(module: nn.Module) -> None:
    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(double)


def _draw_one_mask(x: Tensor) -> Tensor:
    """Drops the same numbers of all tokens of a row."""
    return x * torch.bernoulli(torch.full((len(x), 1, x.shape[2]), 0.5, dtype=x.dtype, device=x.device))


@dataclass(frozen=True)
class LayerCase:
    """Layers and what is made of them: EXACT and such, or what a refusal says of them."""

    name: str
    make: Callable[[], list[nn.Module]]
    whole: str = EXACT  # in microbatches, tokens whole
    recomputed: str = ""  # the same, recomputed; "": as whole
    sliced: str = ""  # in token slices, recomputed or not; "": as whole
    sliced_recomputed: str = ""  # "": as sliced
    change: Callable[[nn.Sequential], object] | None = None  # of the whole model
    together: bool = False  # whether the case's layers are on one stage
    draws: bool = False  # torch's random numbers, which one device draws otherwise

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def model(self) -> nn.Sequential:
        """Returns the model in float64, with the same weights every time."""
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model = nn.Sequential(linear(), CutTokens(), *self.make(), linear(), Classes())
        if not any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
            model.double()
        if self.change is not None:
            self.change(model)
        return model

    def expected(self, is_sliced: bool, is_recomputed: bool) -> str:
        """Returns the outcome in one way of running it."""
        if is_sliced:
            return (self.sliced_recomputed if is_recomputed else "") or self.sliced or self.whole
        return (self.recomputed if is_recomputed else "") or self.whole


_MIXES = r"layer 2 \(\w+\) .*other tokens than its own"
_AGAIN = r"layer 2 \(\w+\).*: the output differs when it is computed again"
_TWICE = r"layer 2 \(\w+\) returns something else when it is called again"
_TOP = r"the nn.Sequential .*nn.Sequential\(model\)"


def hooks() -> list[LayerCase]:
    def on(change: Callable[[Any], object], make: Callable[[], nn.Module] = linear) -> Callable[[], list[nn.Module]]:
        return lambda: [changed(make(), change)]

    return [
        LayerCase("forward hook", on(forward_hook)),
        LayerCase("forward pre-hook", on(pre_hook)),
        LayerCase("backward hook", on(backward_hook)),
        LayerCase("backward pre-hook", on(backward_pre_hook)),
        LayerCase("forward set on a layer", on(doubled_forward)),
        LayerCase("forward set on an activation", on(doubled_forward, nn.Tanh)),
        LayerCase("forward hook on a nested sequence", on(forward_hook, nested)),
        LayerCase("pre-hook on a nested sequence", on(pre_hook, nested)),
        LayerCase("backward hook on a nested sequence", on(backward_hook, nested)),
        LayerCase("backward pre-hook on a nested sequence", on(backward_pre_hook, nested)),
        LayerCase("forward set on a nested sequence", on(doubled_forward, nested)),
        LayerCase("call of a nested sequence", lambda: [DoubledCall(linear(), nn.Tanh())]),
        LayerCase("order of a nested sequence", lambda: [Reversed(linear(), nn.Tanh(), linear())]),
        LayerCase("train of a nested sequence", lambda: [AlwaysEvaluates(linear(), nn.Dropout(0.5))]),
        LayerCase("constructor of a nested sequence", lambda: [Named()]),
        LayerCase("nested sequence with tensors", on(_scaled_by_its_own, nested)),
        LayerCase("nested sequence with a tensor its layer reads", on(_owns_a_parameter, nested)),
        LayerCase("forward set on the model", nested_list, _TOP, change=doubled_forward),
        LayerCase("forward hook on the model", nested_list, _TOP, change=forward_hook),
        LayerCase("pre-hook on the model", nested_list, _TOP, change=pre_hook),
        LayerCase("backward pre-hook on the model", nested_list, _TOP, change=backward_pre_hook),
        LayerCase(
            "a buffer of the model", nested_list, _TOP, change=lambda m: m.register_buffer("scale", torch.ones(()))
        ),
        LayerCase(
            "hook on a stash",
            lambda: _skip(lambda s: [changed(s.stash(), forward_hook), linear(), s.pop(), takes_in(_halves)]),
            r"layer 2 \(SkipStash\) has a forward hook",
        ),
        LayerCase(
            "hook on a pop",
            lambda: _skip(lambda s: [s.stash(), linear(), changed(s.pop(), pre_hook), takes_in(_halves)]),
            r"layer 4 \(SkipPop\) has a forward pre-hook",
        ),
        LayerCase(
            "forward set on a stash",
            lambda: _skip(lambda s: [changed(s.stash(), doubled_forward), linear(), s.pop(), takes_in(_halves)]),
            r"layer 2 \(SkipStash\) has a forward that was set",
        ),
        LayerCase(
            "hook on the cut",
            lambda: [linear()],
            change=lambda m: forward_hook(m[1]),
            sliced=r"layer 1 \(CutTokens\) has a forward hook",
        ),
        LayerCase("hook on a parameter", on(partial(_parameter_hook, lambda g: 2 * g))),
        LayerCase(
            "hook that clips a parameter's gradient",
            on(partial(_parameter_hook, lambda g: g.clamp(-1e-4, 1e-4))),
            BY_MICROBATCH,
            sliced=DIFFERS,
        ),
        LayerCase("hook after a gradient is added", on(_counts_its_accumulations), BY_MICROBATCH, sliced=DIFFERS),
        LayerCase("hook on a tensor", lambda: [Apply(lambda x: _hooked(x, lambda g: 2 * g))]),
        LayerCase(
            "hook on a tensor that mixes tokens",
            lambda: [Apply(lambda x: _hooked(x, lambda g: g / g.norm(dim=(1, 2), keepdim=True)))],
            sliced=_MIXES,
        ),
        LayerCase(
            "hook on a tensor that mixes rows",
            lambda: [Apply(lambda x: _hooked(x, lambda g: g / g.norm()))],
            BY_MICROBATCH,
            sliced=_MIXES,
        ),
    ]


def nested_list() -> list[nn.Module]:
    return [nested()]


def state() -> list[LayerCase]:
    return [
        LayerCase("buffer", lambda: [holds(_table())]),
        LayerCase(
            "buffer changed in training",
            lambda: [ChangesBuffer(lambda m: m.scale.mul_(1.1))],
            r"layer 2 \(ChangesBuffer\): its buffer scale changes in training",
        ),
        LayerCase(
            "data of a buffer changed in training",
            lambda: [ChangesBuffer(lambda m: m.scale.data.mul_(1.1))],
            r"layer 2 \(ChangesBuffer\): its buffer scale changes in training",
        ),
        LayerCase(
            "parameter changed in training",
            lambda: [ChangesBuffer(_clamp_gain)],
            r"layer 2 \(ChangesBuffer\): its parameter gain changes in training",
        ),
        LayerCase(
            "data of a parameter changed in training",
            lambda: [ChangesBuffer(lambda m: m.gain.data.mul_(1.1))],
            r"layer 2 \(ChangesBuffer\): its parameter gain changes in training",
        ),
        LayerCase(
            "tensor attribute changed in place",
            lambda: [With(lambda m, x: m.linear(x) * m.scale.mul_(1.1), linear=linear(), scale=torch.ones(1))],
            r"layer 2 \(With\): its attribute scale changes in training",
        ),
        LayerCase("counter", lambda: [With(_counts, linear=linear(), count=0)], BY_MICROBATCH, _AGAIN, sliced=_TWICE),
        LayerCase(
            "moving mean in an attribute",
            lambda: [With(_less_its_mean, linear=linear(), mean=torch.zeros((), dtype=torch.float64))],
            BY_MICROBATCH,
            _AGAIN,
            sliced=_TWICE,
        ),
        LayerCase("last input kept", lambda: [leaves()]),
        LayerCase(
            "tensor attribute",
            lambda: [With(lambda m, x: m.linear(x) * m.scale, linear=linear(), scale=torch.tensor(1.5))],
        ),
        LayerCase(
            "lists of tensors",
            lambda: [With(lambda m, x: m.linear(x) * m.scales[1], linear=linear(), scales=[None, torch.tensor(1.5)])],
        ),
        LayerCase("lock", lambda: [With(lambda m, x: m.linear(x), linear=linear(), lock=threading.Lock())]),
        LayerCase("pruned", lambda: [prune.random_unstructured(linear(), "weight", 0.5)]),
        LayerCase("weight norm", lambda: [parametrizations.weight_norm(linear())]),
        LayerCase("weight norm of old", lambda: [With(lambda m, x: m.linear(x), linear=_old_weight_norm())]),
        LayerCase(
            "spectral norm",
            lambda: [parametrizations.spectral_norm(linear())],
            r"layer 2 \(ParametrizedLinear\): its buffer .*changes in training",
        ),
        LayerCase("lazy", lambda: [nn.LazyLinear(WIDTH)], r"layer 2 \(LazyLinear\): LazyLinear has no weights yet"),
        LayerCase(
            "extra state", lambda: [ExtraState()], r"layer 2 \(ExtraState\): ExtraState has an extra state, a dict"
        ),
        LayerCase("frozen", lambda: [linear().requires_grad_(False), linear()]),
        LayerCase("without gradient", lambda: [Apply(torch.Tensor.detach)]),
    ]


def randomness() -> list[LayerCase]:
    return [
        LayerCase("dropout", lambda: [linear(), nn.Dropout(0.3)], draws=True),
        LayerCase("noise", lambda: [Apply(lambda x: x * torch.rand_like(x))], draws=True),
        LayerCase(
            "generator",
            lambda: [With(_with_noise, linear=linear(), generator=torch.Generator().manual_seed(3))],
            EXACT,
            _AGAIN,
            sliced=DIFFERS,
            sliced_recomputed=_AGAIN,
        ),
        LayerCase(
            "Python's random numbers",
            lambda: [Apply(lambda x: (x * random.random()).tanh())],
            BY_MICROBATCH,
            _AGAIN,
            sliced=_TWICE,
        ),
        LayerCase(
            "NumPy's random numbers",
            lambda: [Apply(lambda x: (x * float(np.random.rand())).tanh())],
            BY_MICROBATCH,
            _AGAIN,
            sliced=_TWICE,
        ),
        LayerCase(
            "order of tokens",
            lambda: [Apply(lambda x: x * torch.randperm(x.shape[1], device=x.device)[:, None])],
            draws=True,
            sliced=r"layer 2 \(Apply\) draws random numbers that .*tokens share",
        ),
        LayerCase(
            "one mask for all tokens",
            lambda: [Apply(_draw_one_mask)],
            draws=True,
            sliced=r"layer 2 \(Apply\) draws random numbers that .*tokens share",
        ),
    ]


def sharing() -> list[LayerCase]:
    weight = r"layer 4 \(\w+\): its weight is also 2.weight"
    alone = r"layer 4 \(ReadsFrom\) fails on"  # each layer is tried by itself
    reads = r"layer 4 \(ReadsFrom\) reads layer 2 \(\w+\)"
    return [
        LayerCase("layer used twice", lambda: [shared := linear(), nn.Tanh(), shared], together=True),
        LayerCase("layer used twice, apart", lambda: [shared := linear(), nn.Tanh(), shared], weight),
        LayerCase("tied weights", _tied, together=True),
        LayerCase("tied weights, apart", _tied, weight),
        LayerCase("shared buffer", partial(_shared_layers, "buffer")),
        LayerCase("shared module", partial(_shared_layers, "module")),
        LayerCase("weight of another layer", lambda: _reading(lambda m, x: x @ m.weight), together=True),
        LayerCase("weight of another layer, apart", lambda: _reading(lambda m, x: x @ m.weight), reads),
        LayerCase(
            "output of another layer", lambda: _reading(lambda m, x: x + m.output, leaves), together=True, sliced=alone
        ),
        LayerCase(
            "output of another layer, apart", lambda: _reading(lambda m, x: x + m.output, leaves), reads, sliced=alone
        ),
        LayerCase("skip", lambda: _skip(lambda s: [s.stash(), linear(), nn.Tanh(), s.pop(), takes_in(_halves)])),
        LayerCase(
            "half a skip in a nested sequence",
            lambda: _skip(lambda s: [changed(nn.Sequential(s.stash(), linear()), forward_hook), s.pop()]),
            r"layer 2 \(Sequential\): the skip 's' begins in it",
        ),
    ]


def values_and_shapes() -> list[LayerCase]:
    return [
        LayerCase("ReLU in place", lambda: [linear(), nn.ReLU(inplace=True)]),
        LayerCase("input changed in place", lambda: [Apply(lambda x: x.mul_(2).tanh(), linear=False)]),
        LayerCase("view of the input", lambda: [Apply(lambda x: x[:], linear=False), nn.ReLU(inplace=True)]),
        LayerCase(
            "tensor of a skip changed in place",
            lambda: _skip(lambda s: [s.stash(), nn.ReLU(inplace=True), s.pop(), takes_in(_halves)]),
            r"layer 3 \(ReLU\) changes in place a tensor that the skip 's' holds",
        ),
        LayerCase("shape from values", lambda: [Apply(lambda x: x[x > 0])], r"layer 2 \(Apply\): .* depends on values"),
        LayerCase(
            "branch on values",
            lambda: [Apply(lambda x: x if x.sum() > 0 else -x)],
            r"layer 2 \(Apply\): .* depends on values",
        ),
        LayerCase("list", lambda: [Apply(lambda x: [x])], r"layer 2 \(Apply\) returns a list"),
        LayerCase("dict", lambda: [Apply(lambda x: {"x": x})], r"layer 2 \(Apply\) returns a dict"),
        LayerCase("None in a tuple", lambda: [Apply(lambda x: (x, None))], r"layer 2 \(Apply\) returns a tuple of"),
        LayerCase("mask", lambda: [hands_on(lambda x: x > 0), takes_in(_halves)]),
        LayerCase("complex", lambda: [hands_on(lambda x: x * 1j), takes_in(lambda x, y: x + y.imag)]),
        LayerCase("whole numbers", lambda: [hands_on(lambda x: x.long()), takes_in(_halves)]),
        LayerCase(
            "GRU",
            lambda: [With(lambda m, x: m.cells(x)[0], cells=nn.GRU(WIDTH, WIDTH, batch_first=True))],
            sliced=_MIXES,
        ),
        LayerCase("checkpoint", lambda: [With(_checkpointed, inner=nested())]),
        LayerCase("checkpoint of old", lambda: [With(partial(_checkpointed, use_reentrant=True), inner=nested())]),
        LayerCase("autocast", lambda: [With(_in_bfloat16, linear=linear())]),
        LayerCase("function of one's own", lambda: [Apply(Exponential.apply)]),
    ]


def _checkpointed(module: Any, x: Tensor, use_reentrant: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a checkpoint without gradients
        return checkpoint(module.inner, x, use_reentrant=use_reentrant)


def _in_bfloat16(module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.linear(x).double()  # type: ignore[no-any-return]


def autograd() -> list[LayerCase]:
    return [
        LayerCase("gradient in forward", lambda: [With(_adds_inner_gradient, energy=_energy())]),
        LayerCase(
            "gradients of weights in forward",
            lambda: [With(partial(_adds_inner_gradient, with_weights=True), energy=_energy())],
            BY_MICROBATCH,
            sliced=_MIXES,
        ),
        LayerCase("gradient in forward as a number", lambda: [With(_adds_gradient_as_a_number, energy=linear())]),
        LayerCase("functional_call", lambda: [With(_with_doubled_weights, linear=linear())]),
        LayerCase("vmap", lambda: [With(lambda m, x: torch.func.vmap(m.linear)(x), linear=linear())]),
        LayerCase("torch.func.grad", lambda: [With(_adds_gradient, linear=linear())]),
        LayerCase("torch.func.vjp", lambda: [With(_adds_product, linear=linear())]),
        LayerCase("torch.func.jacrev", lambda: [With(_adds_jacobian, linear=linear())]),
        LayerCase("torch.func.hessian", lambda: [With(_adds_curvature, linear=linear())]),
        LayerCase(
            "torch.func.grad of weights",
            lambda: [With(_adds_weight_gradient, linear=linear())],
            BY_MICROBATCH,
            sliced=_MIXES,
        ),
        LayerCase("jvp", lambda: [With(_derivative, linear=linear())]),
        LayerCase(
            "Linear on a vector",
            lambda: [
                With(lambda m, x: x + m.linear(m.vector), linear=linear(), vector=nn.Parameter(torch.randn(WIDTH)))
            ],
        ),
        LayerCase(
            "embedding of one id",
            lambda: [With(lambda m, x: x + m.embed(torch.tensor(2, device=x.device)), embed=nn.Embedding(4, WIDTH))],
        ),
        LayerCase("embedding", lambda: [OfIds()]),
        LayerCase("embedding with max_norm", lambda: [OfIds(max_norm=1.0)]),
        LayerCase("sparse embedding", lambda: [OfIds(sparse=True)]),
        LayerCase(
            "scale_grad_by_freq",
            lambda: [OfIds(scale_grad_by_freq=True)],
            r"layer 2 \(OfIds\): .*scale_grad_by_freq=True",
        ),
    ]


def mixing() -> list[LayerCase]:
    norm = r"layer 2 \(\w+\): a batch norm after layer 1"
    return [
        LayerCase("LayerNorm", lambda: [nn.LayerNorm(WIDTH)]),
        LayerCase("mean over rows", lambda: [Apply(lambda x: x - x.mean(0))], BY_MICROBATCH),
        LayerCase("BatchNorm", lambda: [nn.BatchNorm1d(TOKENS)], BY_MICROBATCH, sliced=norm),
        LayerCase(
            "BatchNorm without momentum", lambda: [nn.BatchNorm1d(TOKENS, momentum=None)], BY_MICROBATCH, sliced=norm
        ),
        LayerCase(
            "forward set on a BatchNorm",
            lambda: [changed(nn.BatchNorm1d(TOKENS), doubled_forward)],
            BY_MICROBATCH,
            sliced=norm,
        ),
        LayerCase("BatchNorm of one's own", lambda: [Ternary(TOKENS)], "Ternary is not one of PyTorch's batch norms"),
        LayerCase("SyncBatchNorm", lambda: [nn.SyncBatchNorm(TOKENS)], "SyncBatchNorm normalises over ranks"),
        LayerCase(
            "InstanceNorm with averages",
            lambda: [nn.InstanceNorm1d(TOKENS, track_running_stats=True)],
            "averages over the batch",
        ),
        LayerCase(
            "causal_attention", lambda: [With(_attends_to_all, inwards=nn.Linear(WIDTH, 3 * WIDTH)) for _ in range(2)]
        ),
        LayerCase(
            "gated convolution",
            lambda: [With(_convolved, convolution=nn.Conv1d(WIDTH, WIDTH, 3), gate=nn.Parameter(torch.zeros(WIDTH)))],
            sliced=_MIXES,
        ),
        LayerCase(
            "attention from zero",
            lambda: [With(_attends, inwards=nn.Linear(WIDTH, 3 * WIDTH), outwards=_from_zero(linear()))],
            sliced=_MIXES,
        ),
        LayerCase(
            "positions from zero",
            lambda: [
                With(
                    lambda m, x: x + m.table(torch.arange(x.shape[1], device=x.device)),
                    table=_from_zero(nn.Embedding(64, WIDTH)),
                )
            ],
            sliced=_MIXES,
        ),
        LayerCase("look-back of 16", lambda: [Apply(look_back)], sliced=_MIXES),
        LayerCase(
            "gate that is a buffer",
            lambda: [
                With(
                    lambda m, x: x + m.buffer_gate * look_back(m.linear(x), 1),
                    linear=linear(),
                    buffer_gate=torch.zeros(()),
                )
            ],
            sliced=_MIXES,
        ),
        LayerCase(
            "gated look-back",
            lambda: [
                With(
                    lambda m, x: x + m.gate * look_back(m.linear(x)),
                    linear=linear(),
                    gate=nn.Parameter(torch.zeros(())),
                )
            ],
            sliced=_MIXES,
        ),
        LayerCase("mixing in training alone", lambda: [With(mixes_in_training)], sliced=_MIXES),
        LayerCase("mean of blocks", lambda: [Apply(mean_of_blocks)], sliced=_MIXES),
        LayerCase("gradient that mixes tokens", lambda: [Apply(NormedGradient.apply)], sliced=_MIXES),
    ]


CASES = [*hooks(), *state(), *randomness(), *sharing(), *values_and_shapes(), *autograd(), *mixing()]
