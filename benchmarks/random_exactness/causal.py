"""Causal LMs at random: architecture, what was done to the model, batch, cut and mesh."""

from __future__ import annotations

import copy
import fnmatch
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.random_exactness import cuts
from benchmarks.random_exactness.comparison import Descent, Piped, Step, Unsplit
from benchmarks.random_exactness.cuts import Dice, Place, happens, parts
from benchmarks.random_exactness.mesh_models import mesh_config
from benchmarks.random_exactness.user_code import ATTENTION, ScaledLoss, WeightedLoss
from benchmarks.zoo.families import architectures, default_config
from benchmarks.zoo.trial import unsplit_model
from benchmarks.zoo.variants import combined
from slipstream import Pipeline, make_mesh
from slipstream.model import causal_cross_entropy, find_anatomy
from slipstream.model.added_adapter import quiet_peft
from slipstream.model.anatomy import expert_modules
from slipstream.model.hooks import kept_frequencies

_TESTS = str(Path(__file__).parents[2] / "tests")
POPULAR = [  # what most users train
    "cohere2",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
    "starcoder2",
]
PATTERNS = ("*embed*", "*.0.*", "*.1.*", "*norm*", "*proj*", "*attn*", "*mlp*", "lm_head*")  # of frozen parameters
LONGEST = 56  # tokens
_LENGTH_DEPENDENT = {"rope dynamic", "rope longrope"}
COEFFICIENT = 0.5  # of a load-balancing loss, so that it counts


def changes() -> Mapping[str, Any]:
    """Returns the changes of tests/support to a model that was built, by name."""
    if _TESTS not in sys.path:
        sys.path.append(_TESTS)
    try:
        return importlib.import_module("support.changes").CHANGES
    except ModuleNotFoundError:
        return {}


@dataclass
class Run:
    """Rows of one length that the unsplit model computes together."""

    ids: Tensor
    labels: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Batch:
    """What one replica's `step` and `evaluate` are given, and what it means for the unsplit model."""

    given: tuple[Any, ...]
    options: dict[str, Any]
    runs: list[Run]


class CausalCase:
    """A case; `axes` say what was drawn, as the record has it."""

    def __init__(self, seed: str, place: Place, folder: Path) -> None:
        self.seed = seed
        self.dice, self.place, self.folder = Dice(f"{seed} causal"), place, folder
        self.of_replicas = Dice(f"{seed} replicas")  # of its own, so that the others draw what they drew before
        self.of_user = Dice(f"{seed} user")  # likewise
        self.axes: dict[str, Any] = {}
        self.has_dropout = False
        self.during: Callable[[], AbstractContextManager[object]] = nullcontext
        self._draw_model()
        self._draw_attention()
        self._draw_trained()

    # What is trained

    def _draw_model(self) -> None:
        variants: list[str] = []
        if self.place.shares:
            self.order = cuts.order(self.dice, self.place)
            config = mesh_config(self.dice, self.place, self.place.pp * self.order.get("stages_per_rank", 1))
        else:
            known = changes()
            kind = self.dice.choices(["popular", "any", "changed"], [40, 35, 25])[0]
            if kind == "changed" and known:
                self._draw_changed(known)
                return
            name = self.dice.choice(architectures() if kind == "any" else POPULAR)
            variants, config = combined(default_config(name), self.dice)
        self.axes |= {"architecture": config.model_type, "variants": variants}
        if self.place.num_copies == self.place.tp == 1 and happens(self.dice, 0.08) and _set_dropout(config):
            self.axes["dropout"] = self.has_dropout = True
        if hasattr(config.get_text_config(), "router_aux_loss_coef"):
            config.get_text_config().router_aux_loss_coef = COEFFICIENT
        self.config, self.variants = config, set(variants)
        self.build: Callable[[], Any] = lambda: unsplit_model(config).train()
        self.sources = ["instance"] * 6 + ["from_config", "from_pretrained"] * 2
        self.is_dynamic = bool(_LENGTH_DEPENDENT & self.variants)

    def _draw_changed(self, known: Mapping[str, Any]) -> None:
        first = self.dice.choice([*known.values()])
        chosen = [first]
        fitting = [each for each in known.values() if each.config is first.config and each.name != first.name]
        if fitting and happens(self.dice, 0.3):
            chosen.append(self.dice.choice(fitting))
        self.axes |= {"architecture": first.config.model_type, "changes": [each.name for each in chosen]}
        self.config, self.variants, self.sources, self.is_dynamic = first.config, set(), ["instance"], False

        def built() -> nn.Module:
            model = first.built()
            for each in chosen[1:]:
                changed = each.make(model)
                model = model if changed is None else changed
            return model.train()

        self.build, self.during = built, first.during

    def _draw_attention(self) -> None:
        """Draws attention of a user's own, which is given whole sequences as a rule: else it is refused."""
        self.attends_by_own = not self.place.shares and happens(self.of_user, 0.06)
        if not self.attends_by_own:
            return
        self.axes["attention"], build = ATTENTION, self.build

        def built() -> nn.Module:
            model: Any = build()
            model.set_attn_implementation(ATTENTION)
            return model  # type: ignore[no-any-return]

        self.build, self.sources = built, ["instance"]

    def _draw_trained(self) -> None:
        kind = self.dice.choices(["all", "frozen", "adapter"], [70, 14, 16])[0]
        self.axes["trained"] = kind
        self.trained = kind
        self.pattern = self.dice.choice(PATTERNS)
        self.adapter_seed = self.dice.randrange(99)

    def models(self) -> tuple[nn.Module, nn.Module]:
        """Returns the unsplit model, and an equal one for the Pipeline."""
        both = []
        for _ in range(2):
            with torch.random.fork_rng(devices=[]):
                model = self.build()
                if self.trained == "adapter" and not isinstance(model, peft.PeftModel):
                    model = adapted(model, self.adapter_seed)
            if self.trained == "frozen":
                names = [name for name, _ in model.named_parameters() if fnmatch.fnmatch(name, self.pattern)]
                for name, parameter in model.named_parameters():
                    if name in names:
                        parameter.requires_grad_(False)
            both.append(model)
        return both[0], both[1]

    # How it runs

    def draw_cut(self, model: nn.Module) -> None:
        """Draws everything else, for a model that there is."""
        dice, place = self.dice, self.place
        base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
        try:
            num_layers = len(find_anatomy(self.config).layers_of(base))
        except Exception:  # which the Pipeline finds too
            num_layers = 4
        self.vocabulary = base.get_input_embeddings().weight.shape[0] if hasattr(base, "get_input_embeddings") else 61
        self.vocabulary = min(self.vocabulary, self.config.get_text_config().vocab_size)
        settings: dict[str, Any] = dict(self.order) if place.shares else cuts.order(dice, place)
        num_stages = place.pp * settings.get("stages_per_rank", 1)
        if (found := cuts.partition(dice, num_layers, num_stages, is_causal=True)) is not None:
            settings["partition"] = found
        self.rows, self.length = dice.randint(1, 5), dice.randint(6, LONGEST)
        kinds = ["plain"] * 5 + ["mapping", "padded mapping", "lengths", "list", "list"]
        kinds += [] if self.is_dynamic else ["documents", "documents", "positions", "list of documents"]
        self.kind = "plain" if self.has_dropout else dice.choice(kinds)
        self.is_list = is_list = self.kind.startswith("list") or (
            place.shares and self.kind in ("lengths", "padded mapping")
        )
        settings |= cuts.rows_and_tokens(dice, self.rows, self.length)
        self.are_apart = place.dp > 1 and not self.is_dynamic and happens(self.of_replicas, 0.6)
        if is_list and (settings.pop("microbatches", None) or isinstance(settings.get("slices"), list)):
            settings |= {"slices": dice.randint(1, 6), "num_microbatches": dice.randint(1, self.rows)}
        if is_list and self.are_apart and happens(self.of_replicas, 0.2):
            settings["slices"] = "auto"  # by measured costs: not the same in every run
            settings.pop("num_microbatches", None)
        if self.has_dropout and "microbatches" not in settings:
            settings.setdefault("slices", 2)  # which a plan of other ranks would choose otherwise: others draw others
        if happens(dice, 0.1):
            settings["vocabulary"] = "spread"
        if happens(dice, 0.05):
            settings["seq_len"] = self.length
        if place.has_processes:
            settings["parallel"] = self._parallel()
        settings["memory"] = cuts.memory(dice, is_causal=True) | cuts.context(self.seed)
        if place.shares and (is_list or "microbatches" in settings or settings.get("num_microbatches", 1) % 2):
            settings["memory"].pop("num_flushes", None)
        is_whole = self.kind == "plain" and settings.get("slices", 8) == 1 and "microbatches" not in settings
        may_omit = is_whole and "changes" not in self.axes  # what it finds out elsewhere would then be wrong
        settings["runtime"] = {"self_check": not (may_omit and happens(dice, 0.5)), "stall_limit": "off"}
        if happens(dice, 0.04):
            settings["runtime"]["fused"] = True
        self.router = (
            self.kind == "plain"
            and "microbatches" not in settings
            and "changes" not in self.axes
            and hasattr(self.config.get_text_config(), "router_aux_loss_coef")
            and not (place.shares and place.tp > 1)
            and happens(dice, 0.5)
        )
        if self.router:
            settings["router_loss"] = "per_layer"
        self.by_mapping = happens(dice, 0.5)
        may_penalise = not self.router and not (place.shares and place.tp > 1)
        self.loss_fn = penalised if happens(dice, 0.06) and may_penalise else causal_cross_entropy
        self.scale = 1024.0 if happens(dice, 0.08) else 1.0
        self.accumulates, self.max_norm = happens(dice, 0.12), 0.5 if happens(dice, 0.3) else None
        self.source = dice.choice(self.sources)
        if self.trained == "adapter" or self.router or self.has_dropout:
            self.source = "instance"
        if self.attends_by_own and happens(self.of_user, 0.8):
            settings.pop("microbatches", None)
            settings["slices"], self.kind, self.is_list = 1, "plain", False
        self._draw_user_code(settings)
        self.settings = settings
        self.axes |= {"ranks": place.pp, **({"mesh": place.mesh} if place.has_processes else {})}
        self.axes |= {"batch": self.kind, "rows": self.rows, "length": self.length, "source": self.source, **settings}
        named = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
        self.axes |= {"loss_fn": named, "loss_scale": self.scale, "accumulates": self.accumulates}
        self.axes |= {"max_norm": self.max_norm, "router_loss": self.router}
        if place.dp > 1:
            self.axes["replicas"] = "of other rows" if self.are_apart else "of equally many rows"
        if self.trained == "frozen":
            self.axes["frozen"] = self.pattern

    def _draw_user_code(self, settings: Mapping[str, Any]) -> None:
        """Draws a loss with weights, and whether a step without gradients comes before each."""
        kind = self.of_user.choices(["", "weighted", "scaled"], [88, 6, 6])[0]
        if kind == "scaled" and self.place.num_copies > 1:
            kind = ""  # a parameter of the loss's own would get the gradient of a copy's tokens alone, and is refused
        if kind and self.loss_fn is causal_cross_entropy and self.place.tp == 1 and not self.router:
            self.loss_fn = WeightedLoss(self.vocabulary) if kind == "weighted" else ScaledLoss()
        modes = [torch.no_grad, torch.inference_mode]
        self.refused_within = self.of_user.choice(modes) if happens(self.of_user, 0.1) else None
        if self.refused_within is not None:
            self.axes["refused within"] = self.refused_within.__name__

    def _parallel(self) -> dict[str, Any]:
        dice, place = self.dice, self.place
        found: dict[str, Any] = {}
        if place.cp > 1:
            found["context_exchange"] = dice.choice(["auto", "heads", "keys"])
        if place.tp > 1 and happens(dice, 0.4):
            found["sequence_parallel"] = True
        if place.num_copies > 1 and happens(dice, 0.4):
            found["shard"] = "optimizer"
        elif self._may_shard() and happens(dice, 0.5):
            found["shard"] = "parameters"
        return found

    def _may_shard(self) -> bool:
        """Returns whether replicas can have parts of parameters."""
        is_whole = self.place.num_copies > 1 and self.place.tp == 1
        return is_whole and not (self.place.shares and (self.config.tie_word_embeddings or self.trained == "adapter"))

    def steps(self) -> list[Step]:
        """Returns the steps: of each batch what every replica is given. Later ones may have other lengths."""
        fixed = "microbatches" in self.settings or isinstance(self.settings.get("slices"), list)
        found = []
        for number in range(3 if self.place.shares else 2):
            if number and not fixed and happens(self.dice, 0.5):
                self.length = self.dice.randint(6, LONGEST)
            num_batches = 1 + (self.accumulates and number > 0)
            batches = [[self._batch(*size) for size in self._sizes(fixed)] for _ in range(num_batches)]
            found.append(Step(batches, self.max_norm, self.kind != "positions" or self.by_mapping))
        return found

    def _sizes(self, fixed: bool) -> list[tuple[int, int]]:
        """Returns the rows and tokens of each replica's batch: of all alike, or, but for what is fixed, drawn anew."""
        found = [(self.rows, self.length)] * self.place.dp
        if not self.are_apart:
            return found
        dice, fewest = self.of_replicas, 1 if self.is_list else self.settings.get("num_microbatches", 1)
        for replica in range(1, len(found)):
            rows = self.rows if "microbatches" in self.settings else dice.randint(fewest, max(fewest, 6))
            found[replica] = rows, self.length if fixed else dice.randint(6, LONGEST)
        return found

    def _batch(self, rows: int, length: int) -> Batch:
        dice = self.dice
        numbers = torch.Generator().manual_seed(dice.randrange(1 << 30))
        ids = torch.randint(1, self.vocabulary, (rows, length), generator=numbers)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=numbers) < dice.choice([0.0, 0.0, 0.3, 0.8]), -100)
        labels[0, -1] = ids[0, -1]
        if rows > 1 and happens(dice, 0.1):
            labels[dice.randrange(1, rows)] = -100
        return getattr(self, f"_{self.kind.replace(' ', '_')}")(ids, labels)

    def _plain(self, ids: Tensor, labels: Tensor) -> Batch:
        number = self.settings.get("num_microbatches", 1) if self.router else 1
        pairs = zip(ids.tensor_split(number), labels.tensor_split(number), strict=True)
        return Batch((ids, labels), {}, [Run(*pair) for pair in pairs])

    def _mapping(self, ids: Tensor, labels: Tensor) -> Batch:
        given = {"input_ids": ids, "labels": labels}
        if happens(self.dice, 0.5):
            given["attention_mask"] = torch.ones_like(ids)
        return Batch((given,), {}, [Run(ids, labels)])

    def _row_lengths(self, rows: int, length: int) -> list[int]:
        longest = length if self.is_dynamic or happens(self.dice, 0.8) else max(2, length - 2)
        found = [self.dice.randint(2, longest) for _ in range(rows)]
        if happens(self.dice, 0.8):
            found[self.dice.randrange(rows)] = longest
        return found

    def _padded(self, ids: Tensor, labels: Tensor) -> tuple[list[int], Tensor, list[Run]]:
        """Returns lengths, a mask, and rows alone; those of a tensor whose frequencies follow its width stay padded."""
        lengths = self._row_lengths(*ids.shape)
        mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        labels[mask == 0] = -100
        labels[0, lengths[0] - 1] = ids[0, lengths[0] - 1]
        if self.is_dynamic and self.kind == "padded mapping":
            return lengths, mask, [Run(ids, labels, {"attention_mask": mask})]
        return lengths, mask, [Run(ids[r : r + 1, :n], labels[r : r + 1, :n]) for r, n in enumerate(lengths)]

    def _padded_mapping(self, ids: Tensor, labels: Tensor) -> Batch:
        _, mask, runs = self._padded(ids, labels)
        return Batch(({"input_ids": ids, "labels": labels, "attention_mask": mask},), {}, runs)

    def _lengths(self, ids: Tensor, labels: Tensor) -> Batch:
        lengths, _, runs = self._padded(ids, labels)
        return Batch((ids, labels), {"lengths": torch.tensor(lengths)}, runs)

    def _list(self, ids: Tensor, labels: Tensor) -> Batch:
        lengths = self._row_lengths(*ids.shape)
        labels[0, lengths[0] - 1] = ids[0, lengths[0] - 1]
        pairs = [(i[:n], each[:n]) for i, each, n in zip(ids, labels, lengths, strict=True)]
        runs = [Run(i[None], each[None]) for i, each in pairs]
        return Batch(([i for i, _ in pairs], [each for _, each in pairs]), {}, runs)

    def _cut_documents(self, length: int) -> list[int]:
        return parts(self.dice, length, self.dice.randint(1, 5))

    def _documents_of(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, list[Run]]:
        """Returns the document ids and positions of a row, and its documents alone."""
        sizes = self._cut_documents(len(ids))
        last = sizes[-1]
        labels[-1] = ids[-1] if last > 1 else labels[-1]
        numbers = [self.dice.randrange(3) * 10 + place for place in range(len(sizes))]
        document_ids = torch.tensor([number for number, size in zip(numbers, sizes, strict=True) for _ in range(size)])
        positions = torch.cat([torch.arange(size) for size in sizes])
        ends = list(accumulate(sizes))
        runs = [Run(ids[None, e - s : e], labels[None, e - s : e]) for e, s in zip(ends, sizes, strict=True)]
        return document_ids, positions, runs

    def _documents(self, ids: Tensor, labels: Tensor, by_positions: bool = False) -> Batch:
        rows = [self._documents_of(i, each) for i, each in zip(ids, labels, strict=True)]
        runs = [run for _, _, found in rows for run in found]
        if by_positions:
            positions = torch.stack([each for _, each, _ in rows])
            if self.by_mapping:
                return Batch(({"input_ids": ids, "labels": labels, "position_ids": positions},), {}, runs)
            return Batch((ids, labels), {"position_ids": positions}, runs)
        return Batch((ids, labels), {"document_ids": torch.stack([each for each, _, _ in rows])}, runs)

    def _positions(self, ids: Tensor, labels: Tensor) -> Batch:
        return self._documents(ids, labels, by_positions=True)

    def _list_of_documents(self, ids: Tensor, labels: Tensor) -> Batch:
        lengths = self._row_lengths(*ids.shape)
        pairs = [(i[:n], each[:n].clone()) for i, each, n in zip(ids, labels, lengths, strict=True)]
        rows = [self._documents_of(i, each) for i, each in pairs]
        document_ids = [each for each, _, _ in rows]
        runs = [run for _, _, found in rows for run in found]
        return Batch(([i for i, _ in pairs], [each for _, each in pairs]), {"document_ids": document_ids}, runs)

    # What it is compared with

    def unsplit(self, model: nn.Module) -> Unsplit:
        loss_fn = copy.deepcopy(self.loss_fn)
        descent = Descent(self.place.shares)
        return Unsplit(model, partial(self._sums, loss_fn), self.during, descent, _gradients_of(loss_fn))

    def _sums(self, loss_fn: Any, model: nn.Module, replicas: list[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        for run in (run for batch in replicas for run in batch.runs):
            if run.ids.shape[1] < 2:
                continue
            options = dict(run.options) | ({"output_router_logits": True} if self.router else {})
            with kept_frequencies(model) if self.kind in ("list", "lengths") else nullcontext():
                output = model(input_ids=run.ids, use_cache=False, **options)
            total, count = loss_fn(output.logits[:, :-1], run.labels[:, 1:])
            if self.router and model.training:
                total = _WithAddition.apply(total, self._balance(model, output.router_logits) * count)
            yield total, count

    def _balance(self, model: nn.Module, router_logits: Any) -> Tensor:
        loss = importlib.import_module("support.mixtures").switch_loss
        top_k = self.config.get_text_config().num_experts_per_tok
        return COEFFICIENT * torch.stack([loss(each.flatten(0, -2), top_k) for each in router_logits]).mean()

    def pipeline(self, model: nn.Module, is_reference: bool = False) -> Pipeline:
        """Returns the Pipeline of the model, or with dropout the one on a single rank that it is compared with."""
        settings = copy.deepcopy(self.settings)
        settings["precision"] = {"dtype": "float64"} if self.source != "instance" else {}
        if self.loss_fn is not causal_cross_entropy:
            settings["loss_fn"] = self.loss_fn
        if is_reference:
            for name in ("partition", "stages_per_rank", "vocabulary"):
                settings.pop(name, None)
            # Attention dropout draws by the block of keys, so where these lie stays.
            memory = settings.pop("memory", {})
            settings["memory"] = {name: memory[name] for name in memory if name == "context"}
            return Pipeline(model, **cuts.grouped(settings | {"schedule": "gpipe", "num_ranks": 1}))
        place = self.place
        if not place.has_processes:
            settings["num_ranks"] = place.pp
        elif place.num_copies * place.tp > 1 or happens(self.dice, 0.5):
            settings["mesh"] = make_mesh(**place.sizes)
        options = cuts.grouped(settings)
        if self.source == "instance":
            with self.during():
                return Pipeline(model, **options)
        freeze = [self.pattern] if self.trained == "frozen" and _matches(model, self.pattern) else []
        if self.source == "from_config":
            return Pipeline.from_config(self.config, seed=3, freeze=freeze, **options)
        if not dist.is_initialized() or dist.get_rank() == 0:
            model.save_pretrained(self.folder)
        if dist.is_initialized():
            dist.barrier()
        return Pipeline.from_pretrained(self.folder, freeze=freeze, **options)

    def own_start(self, model: nn.Module) -> nn.Module:
        """Returns the model with which a Pipeline of this source begins."""
        if self.source == "from_pretrained":
            model.config.save_pretrained(self.folder)  # which some configurations that train refuse
        if self.source != "from_config":
            return model
        torch.manual_seed(3)
        made = AutoModelForCausalLM.from_config(
            copy.deepcopy(self.config), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        for (_, mine), (_, given) in zip(made.named_parameters(), model.named_parameters(), strict=True):
            mine.requires_grad_(given.requires_grad)
        return made.train()

    def piped(self, pipe: Pipeline) -> Piped:
        def mine(replicas: list[Batch]) -> Batch:
            return replicas[pipe.replica if self.place.dp > 1 else 0]

        def arguments(replicas: list[Batch]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return mine(replicas).given, mine(replicas).options

        def counts(batches: Any) -> float | None:
            runs = [run for replicas in batches for batch in replicas for run in batch.runs]
            if isinstance(self.loss_fn, WeightedLoss) and len(batches) > 1:
                return sum(float(self.loss_fn.divisor(run.labels[:, 1:])) for run in runs)
            return sum(int((run.labels[:, 1:] != -100).sum()) for run in runs) if len(batches) > 1 else None

        options = {"loss_scale": self.scale} if self.scale != 1.0 else {}
        descent, more = Descent(self.place.shares), _gradients_of(self.loss_fn)
        return Piped(pipe, arguments, counts, options, self.during, descent, more, self.refused_within)


class _WithAddition(torch.autograd.Function):
    """A loss to whose gradient that of another is added, which isn't in its value."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, addition: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


def _gradients_of(loss_fn: Any) -> Callable[[], dict[str, Tensor]]:
    """Returns a function that takes the gradients of a loss's own parameters."""
    return loss_fn.take_gradients if isinstance(loss_fn, ScaledLoss) else dict


def penalised(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A loss of a user's own: cross-entropy, and a small penalty of large logits where targets count."""
    total, count = causal_cross_entropy(outputs, targets)
    return total + 1e-2 * outputs.logsumexp(-1)[targets != -100].square().sum(), count


def _matches(model: nn.Module, pattern: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for name, _ in model.named_parameters())


def _set_dropout(config: PretrainedConfig) -> bool:
    found = False
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and "drop" in name and "layer" not in name:
                setattr(part, name, 0.2)
                found = True
    return found


def adapted(model: Any, seed: int, dropout: float = 0.0) -> nn.Module:
    """Returns the model with a LoRA adapter of some of its linear layers, all of whose weights are drawn."""
    dice = random.Random(seed)
    head = model.get_output_embeddings()
    names = sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
    )
    targets: Any = dice.sample(names, dice.randint(1, len(names))) if names and happens(dice, 0.6) else "all-linear"
    settings: dict[str, Any] = {"r": 2, "target_modules": targets, "task_type": "CAUSAL_LM", "lora_dropout": dropout}
    if happens(dice, 0.2) and not any(True for _ in expert_modules(model)):  # PEFT hasn't it of their weights
        settings["use_dora"] = True
    if happens(dice, 0.2):
        settings["use_rslora"] = True
    if happens(dice, 0.1):
        settings["bias"] = "all"
    torch.manual_seed(seed)
    with quiet_peft():
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings), autocast_adapter_dtype=False).double()
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return wrapped.train()
