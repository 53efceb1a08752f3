"""Sequences of layers at random: images with batch norms and skips, rows of tokens, decoders whose tokens are cut."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from benchmarks.random_exactness import cuts
from benchmarks.random_exactness.causal import changes
from benchmarks.random_exactness.comparison import Piped, Step, Unsplit
from benchmarks.random_exactness.cuts import Dice, Place, happens
from slipstream import CutTokens, Pipeline, Skip, causal_attention, make_mesh

WIDTH, VOCABULARY, CLASSES = 8, 13, 5
Pair = tuple[Tensor, Tensor]  # inputs and targets
Layers = list[nn.Module]


class Residual(nn.Module):
    """Adds to its input what a layer makes of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.inner(inputs)


class Attend(nn.Module):
    """Causal attention of two heads, of a slice to all tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.inward(hidden).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return hidden + self.outward(causal_attention(query, key, value).transpose(1, 2).flatten(2))


class Take(nn.Module):
    """The first of what a layer of PyTorch returns."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.inner(*[inputs] * self.times)[0]


class Gate(nn.Module):
    """One Linear at two places of its forward, and a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.linear(self.linear(inputs).sigmoid() * inputs * self.scale + self.shift)


class Fork(nn.Module):
    """A tensor as a tuple with a mask, and a view of it."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return inputs, inputs > 0, inputs[..., :4]


class Join(nn.Module):
    """The tuple as a tensor."""

    def forward(self, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        inputs, mask, part = tensors
        return (inputs * mask).index_add(-1, torch.arange(4), part.sin()) + inputs


class Sum(nn.Module):
    """What a skip hands on, added to its input."""

    def forward(self, tensors: tuple[Tensor, Tensor]) -> Tensor:
        return tensors[0] + tensors[1].tanh()


class InPlace(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mul(1.5).add_(0.1)


def _skipped(name: str) -> Layers:
    skip = Skip(name)
    return [skip.stash(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), skip.pop(), Sum()]


def _hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda module, args, output: output * 1.1 + 0.1 * args[0])
    return layer


def _patched() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = lambda inputs: functional.linear(inputs, layer.weight.tanh(), layer.bias)
    return layer


def _nested() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, WIDTH)))


BY_TOKEN: dict[str, Callable[[str], Layers]] = {  # (b, T, width) -> the same, each token by itself; `name` is a skip's
    "linear": lambda name: [nn.Linear(WIDTH, WIDTH), nn.GELU()],
    "bias alone": lambda name: [nn.Linear(WIDTH, WIDTH, bias=False)],
    "layer norm": lambda name: [nn.LayerNorm(WIDTH)],
    "RMS norm": lambda name: [nn.RMSNorm(WIDTH)],
    "residual": lambda name: [Residual(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()))],
    "PReLU": lambda name: [nn.Linear(WIDTH, WIDTH), nn.PReLU(), nn.Softplus()],
    "gate": lambda name: [Gate()],
    "GLU": lambda name: [nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()],
    "weight norm": lambda name: [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))],
    "nested": lambda name: [_nested()],
    "tuple": lambda name: [Fork(), Join()],
    "in place": lambda name: [nn.Linear(WIDTH, WIDTH), InPlace(), nn.ReLU(inplace=True)],
    "skip": _skipped,
    "hooked": lambda name: [_hooked()],
    "patched": lambda name: [_patched()],
    "identity": lambda name: [nn.Identity(), nn.Tanh()],
    "dropout": lambda name: [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)],
    "group norm of rows": lambda name: [nn.Unflatten(2, (2, 4)), nn.LayerNorm(4), nn.Flatten(2)],
}
BY_ROW: dict[str, Callable[[str], Layers]] = {  # mixes the tokens of a row
    "encoder": lambda name: [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)],
    "attention": lambda name: [Take(nn.MultiheadAttention(WIDTH, 2, batch_first=True), times=3)],
    "GRU": lambda name: [Take(nn.GRU(WIDTH, WIDTH, batch_first=True))],
    "LSTM": lambda name: [Take(nn.LSTM(WIDTH, WIDTH, batch_first=True))],
    "mean": lambda name: [Residual(_Mean())],
    "convolution": lambda name: [_Convolve()],
}
CAUSAL: dict[str, Callable[[str], Layers]] = {"attend": lambda name: [Attend()]}


class _Mean(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(1, keepdim=True).expand_as(inputs)


class _Convolve(nn.Module):
    """A convolution over tokens, ahead and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.conv(inputs.mT).mT


class SequenceCase:
    """A case; `axes` say what was drawn, as the record has it."""

    def __init__(self, seed: str, place: Place, folder: Path) -> None:
        self.seed = seed
        self.dice, self.place = Dice(f"{seed} sequence"), place
        self.kind = self.dice.choice(["images", "tokens", "cut", "cut"])
        table = {"images": {}, "tokens": BY_TOKEN | BY_ROW, "cut": BY_TOKEN | CAUSAL}[self.kind]
        if self.kind == "images":
            changes()  # makes the tests' support importable
            self.images = importlib.import_module("support.sequences.random_layers")
            table = dict.fromkeys(kind for kind in self.images.KINDS)
        number = self.dice.randint(2, 6)
        self.names = self.dice.choices([*table], k=number)
        if self.kind == "cut" and happens(self.dice, 0.8):
            self.names[self.dice.randrange(number)] = "attend"
        self.before = self.dice.choices([*(BY_TOKEN | BY_ROW)], k=self.dice.randint(0, 2)) if self.kind == "cut" else []
        self.has_dropout = "dropout" in (*self.names, *self.before)
        if self.has_dropout and place.dp > 1:  # each replica draws its own
            self.names, self.before = ([n for n in names if n != "dropout"] for names in (self.names, self.before))
            self.has_dropout = False
        self.axes: dict[str, Any] = {"model": self.kind, "layers": self.names}
        if self.kind == "cut":
            self.axes["layers before the cut"] = self.before
        self.is_tied = self.kind == "cut" and happens(self.dice, 0.1)
        self.rows, self.length = self.dice.randint(1, 7), self.dice.randint(3, 20)
        # By dice of its own, so that other cases draw what they drew before there were any.
        far = Dice(f"{seed} long skips")
        pairs = [(begin, end) for end in range(len(self.names)) for begin in range(end)]
        has_any = self.kind != "images" and pairs and happens(far, 0.35)
        self.long_skips = far.sample(pairs, far.randint(1, min(3, len(pairs)))) if has_any else []
        if self.long_skips:
            self.axes["skips past layers"] = self.long_skips

    def models(self) -> tuple[nn.Module, nn.Module]:
        return self._model(), self._model()

    def _model(self) -> nn.Sequential:
        if self.kind == "images":
            return self.images.build(self.names).train()
        torch.manual_seed(4)
        table = BY_TOKEN | BY_ROW | CAUSAL
        begun = [layer for number, name in enumerate(self.before) for layer in table[name](f"before {number}")]
        blocks = [table[name](f"skip {number}") for number, name in enumerate(self.names)]
        for number, (stash, pop) in enumerate(self.long_skips):
            skip = Skip(f"long {number}")
            blocks[stash], blocks[pop] = [skip.stash(), *blocks[stash]], [*blocks[pop], skip.pop(), Sum()]
        layers = [layer for block in blocks for layer in block]
        first = nn.Embedding(VOCABULARY, WIDTH)
        head = nn.Linear(WIDTH, VOCABULARY if self.kind == "cut" else CLASSES)
        end: Layers = [head] if self.kind == "cut" else [_Pool(), head]
        cut: Layers = [*begun, CutTokens()] if self.kind == "cut" else []
        if self.is_tied:
            head.weight = first.weight
        model = nn.Sequential(first, *cut, *layers, *end).double().train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64), alpha=0.1)
        return model

    def draw_cut(self, model: nn.Module) -> None:
        dice, place = self.dice, self.place
        settings: dict[str, Any] = cuts.order(dice, place)
        num_stages = place.pp * settings.get("stages_per_rank", 1)
        num_layers = sum(not isinstance(each, nn.Sequential) for each in _flat(model))
        found = cuts.partition(dice, num_layers, num_stages, is_causal=False)
        if found is not None:
            settings["partition"] = found
        settings |= cuts.rows_and_tokens(dice, self.rows, self.length, self.kind == "cut")
        settings["memory"] = cuts.memory(dice, is_causal=False) | (
            cuts.context(self.seed) if self.kind == "cut" else {}
        )
        self.is_list = self.kind == "cut" and happens(dice, 0.2)
        if self.is_list and (settings.pop("microbatches", None) or isinstance(settings.get("slices"), list)):
            settings["slices"] = dice.randint(1, 4)
        if place.dp > 1 and happens(dice, 0.4):
            settings["parallel"] = {"shard": "optimizer"}
        self.max_norm = 0.5 if happens(dice, 0.3) else None
        self.settings = settings
        self.axes |= {"ranks": place.pp, **({"mesh": place.mesh} if place.has_processes else {})}
        self.axes |= {"rows": self.rows, "length": self.length, **settings, "list": self.is_list, "tied": self.is_tied}

    def steps(self) -> list[Step]:
        fixed = "microbatches" in self.settings or isinstance(self.settings.get("slices"), list)
        found = []
        for number in range(2):
            if number and not fixed and happens(self.dice, 0.5):
                self.length = self.dice.randint(3, 20)
            evaluates = not number or self.place.dp == 1  # replicas' batch norms have averages of their own afterwards
            found.append(Step([[self._batch() for _ in range(self.place.dp)]], self.max_norm, evaluates))
        return found

    def _batch(self) -> Any:
        seed = self.dice.randrange(1 << 30)
        if self.kind == "images":
            return self.images.batch(self.rows, seed)
        numbers = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, VOCABULARY, (self.rows, self.length), generator=numbers)
        if self.kind == "tokens":
            return ids, torch.randint(0, CLASSES, (self.rows,), generator=numbers)
        targets = ids.roll(-1, 1).masked_fill(torch.rand(ids.shape, generator=numbers) < 0.3, -100)
        targets[0, 0] = ids[0, 0]
        if not self.is_list:
            return ids, targets
        lengths = [self.dice.randint(1, self.length) for _ in range(self.rows)]
        return tuple([each[:n] for each, n in zip(both, lengths, strict=True)] for both in (ids, targets))

    def unsplit(self, model: nn.Module) -> Any:
        return _WithNorms(model, self._sums) if self.kind == "images" else Unsplit(model, self._sums)

    def _sums(self, model: nn.Module, replicas: list[Pair]) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in replicas:
            number = self.settings.get("num_microbatches", 1)
            groups = self.settings.get("microbatches")
            if self.is_list:
                rows = [(each[None], target[None]) for each, target in zip(inputs, targets, strict=True)]
            else:
                sizes = [count for count, _ in groups] if groups else [len(e) for e in inputs.tensor_split(number)]
                sizes = sizes if model.training else [len(inputs)]
                rows = [*zip(inputs.split(sizes), targets.split(sizes), strict=True)]
            for given, wanted in rows:
                outputs = model(given)
                if outputs.dim() == 3:
                    outputs, wanted = outputs.flatten(0, 1), wanted.flatten()
                yield functional.cross_entropy(outputs, wanted, reduction="sum"), (wanted != -100).sum()

    def pipeline(self, model: nn.Module, is_reference: bool = False) -> Pipeline:
        settings = copy.deepcopy(self.settings)
        inputs, _ = self._batch()
        example = inputs[0][None] if self.is_list else inputs
        settings["layers"] = {"example": example}
        settings["runtime"] = {"stall_limit": "off"}
        if self.kind == "cut":
            settings["loss_fn"] = token_loss
        if is_reference:
            for name in ("partition", "stages_per_rank", "memory"):
                settings.pop(name, None)
            return Pipeline(model, **cuts.grouped(settings | {"schedule": "1f1b", "num_ranks": 1}))
        place = self.place
        if not place.has_processes:
            settings["num_ranks"] = place.pp
        elif place.dp > 1:
            settings["mesh"] = make_mesh(place.pp, place.dp)
        return Pipeline(model, **cuts.grouped(settings))

    def own_start(self, model: nn.Module) -> nn.Module:
        return model

    def piped(self, pipe: Pipeline) -> Piped:
        def arguments(replicas: list[Pair]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return replicas[pipe.replica if self.place.dp > 1 else 0], {}

        return Piped(pipe, arguments)


class _WithNorms(Unsplit):
    """Moves the averages of batch norms as the whole mini-batch moves them, of the first replica."""

    def step(self, batches: Any) -> Tensor:
        norms = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm2d)]
        fresh, seen = copy.deepcopy(norms), {norm: list[Tensor]() for norm in norms}
        hooks = [norm.register_forward_pre_hook(lambda m, args: seen[m].append(args[0].data)) for norm in norms]
        loss = super().step(batches)
        for hook in hooks:
            hook.remove()
        for norm, new in zip(norms, fresh, strict=True):
            inputs = seen[norm][: len(seen[norm]) // len(batches[0])]  # rank 0, whose state is compared, has these
            new(torch.cat(inputs))
            norm.load_state_dict(new.state_dict())
        return loss


class _Pool(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(1)


def token_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the tokens' cross-entropies, and how many count."""
    total = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def _flat(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of nested sequences, one by one."""
    if type(model) is nn.Sequential and not model._forward_hooks:
        return [layer for child in model for layer in _flat(child)]
    return [model]
