"""Runs one stage of a causal LM, a range of its layers, slice by slice in the model's own code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from slipstream.attention import ContextStore, TokenExchange
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import PlaceSeed, current_draws
from slipstream.model.anatomy import ModelAnatomy, uses_randomness
from slipstream.model.autograd_memory import MovedInputs, RecomputePolicy, recompute_in_backward
from slipstream.model.cutting import PassThrough, has_end, keep_layers, second_half
from slipstream.model.hooks import attention
from slipstream.model.hooks.attention import masks_and_biases
from slipstream.model.hooks.crossing_tensors import (
    CrossingTensor,
    CrossingTensors,
    first_output,
    hidden_states,
    with_first_output,
    with_hidden_states,
)
from slipstream.model.hooks.layer_seeds import LayerSeeds, TensorParallelLayers
from slipstream.model.hooks.length_dependent_rope import fix_length_dependent_rope, kept_frequencies
from slipstream.model.hooks.masks import MaskTables, masks_of_text
from slipstream.model.hooks.router_loss import RouterLoss
from slipstream.model.hooks.slice_cache import (
    SliceCache,
    as_several_tokens,
    by_document,
    cache_name,
    has_lone_tokens,
    recorded_carriers,
)
from slipstream.model.hooks.token_slice import (
    SliceContext,
    TokenParts,
    TokenSlice,
    active_forward,
    current_slice,
    note_output,
    noting_outputs,
    running_alone,
)
from slipstream.model.initial_states import give_initial_states
from slipstream.model.layer_range import LayerRange, ModelEnd
from slipstream.model.pipeline_stage import PipelineStage, SpreadExperts, in_evaluation
from slipstream.model.tensors import Tensors, TensorSpec
from slipstream.model.tiled_head import HeadTiles, TiledHead
from slipstream.model.vocabulary import SpreadEmbedding, SpreadHead, separate_head, shared_weights
from slipstream.model.weight_gradients import add_expert_gradients_in_place, add_weight_gradients_in_place
from slipstream.schedule import BACKWARDS, Op


class CausalLMStage(PipelineStage):
    """The layers `owned` of `model`, which is cut in place; the first stage embeds, the last returns logits.

    `receives` and `sends` describe the messages between stages. With `tensor` the model has this rank's shares of all
    weights, and every rank runs the stage at the same time. With `head`, whose rows are spread over ranks, the last
    stage gives the head's input, and `vocabulary` has the rows that lie next to this stage. With `router_loss` each
    layer's routers add to the loss. With `exchange`, other ranks have other tokens of every slice; with `experts` the
    model has this rank's experts. `recompute` says which layers keep only their inputs, until a backward computes them
    again. With `loss_tokens` the last stage has the logits of so many tokens at a time. `inputs_on_host` is the share
    of the first layers whose inputs are on the host where a microbatch is one slice.
    """

    has_skips = False  # past other stages

    def __init__(
        self,
        model: PreTrainedModel,
        anatomy: ModelAnatomy,
        owned: LayerRange,
        device: torch.device,
        tensor: TensorParallelLayers | None = None,
        head: SpreadHead | None = None,
        router_loss: RouterLoss | None = None,
        recompute: RecomputePolicy | None = None,
        exchange: Callable[[TokenParts], TokenExchange] | None = None,
        experts: SpreadExperts | None = None,
        loss_tokens: int | None = None,
        inputs_on_host: float = 0.0,
    ) -> None:
        self.attends_itself = anatomy.attends_itself
        if not anatomy.attends_itself:
            attention.use_attention(model, attention.NAME, anatomy.layers_of(model))
        self.owned, self.layers_here = owned, owned.layers  # numbers of the layers with at least a half here
        self.num_layers = len(anatomy.layers_of(model))
        self.is_first, self.is_last = (has_end(end, anatomy, owned, self.num_layers) for end in ModelEnd)
        keep_layers(model, anatomy, owned, device)
        self.vocabulary = None if head is None else head.rows  # this rank's rows of a spread head
        self.has_loss = self.is_last and head is None
        self._embedded: TensorSpec | None = None  # a token's embedding, where its rows are spread
        if head is not None:
            model.set_submodule(head.name, head.rows or PassThrough(model.get_submodule(head.name)))
        if head is not None and head.embedding:
            embedding = SpreadEmbedding(model.get_submodule(head.embedding), head.rows, self.is_first)
            model.set_submodule(head.embedding, embedding)
            self._embedded = TensorSpec(torch.Size((embedding.embedding_dim,)), embedding.weight.dtype)
        fix_length_dependent_rope(model)
        self._tensor = tensor
        self._exchange = exchange
        self._device = device
        self._seeds = LayerSeeds(model, uses_randomness(model), self.num_layers, tensor)
        self._seeds.install(self.is_first)
        add_weight_gradients_in_place(model)
        add_expert_gradients_in_place(model)
        self.experts = experts
        if experts is not None:
            experts.install(model)
        self.model: PreTrainedModel = model.to(device)
        self._second_names = anatomy.second_names
        self._canonical = {name: names[0] for names in anatomy.shared for name in names}
        self.tied = [] if self.embeds_by_parts else separate_head(model, anatomy, self.is_first, self.is_last)
        self.tied += shared_weights(model, anatomy)
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self._form = anatomy.hidden_form(self.hidden_size)
        self._takes_more = anatomy.hidden is not None
        weights = chain(model.get_submodule(anatomy.layers).parameters(), model.parameters())
        # With a spread embedding, an end without layers has no weights that tell the dtype.
        embedded = [] if self._embedded is None else [self._embedded.dtype]
        self.hidden_dtype = next(chain((weight.dtype for weight in weights if weight.is_floating_point()), embedded))
        if getattr(model.config, "residual_in_fp32", False):  # Mamba's
            self.hidden_dtype = torch.promote_types(self.hidden_dtype, torch.float32)
        self.tables = MaskTables(device)
        self._first_position = anatomy.first_position(model.config)
        self._cache_name = cache_name(model)
        asked = getattr(model.config.get_text_config(), "output_router_logits", False)
        self._without_router_logits = {"output_router_logits": False} if asked else {}
        self._recompute = recompute or RecomputePolicy()
        self._recomputed: dict[nn.Module, Callable[..., Any]] = {}  # the forwards of layers that may be recomputed
        self._moved_inputs: MovedInputs | None = None
        if inputs_on_host and self._recompute.num_layers:
            self._moved_inputs = MovedInputs(device, round(inputs_on_host * len(self.layers_here)))
        self._tiled_head = TiledHead(model, loss_tokens) if self.has_loss and loss_tokens is not None else None
        self._carriers: list[nn.Module] | None = None  # layers that carry states; None: not known yet
        layers = anatomy.layers_of(model)
        self.layers = [layers[index] for index in self.layers_here]
        give_initial_states(self.model)
        self._crossing = CrossingTensors(anatomy.crossing, owned, self.is_first)
        self._watch(layers, anatomy)
        self._crossing.install(layers)
        self._router_loss = router_loss
        if router_loss is not None:
            router_loss.install(model)
        self._run_token(1, records_masks=True)  # records the model's mask functions, before documents wrap them

    def check_measurable(self) -> None:
        """Raises SlipstreamError where times and memory aren't those of hidden states that go from stage to stage."""
        if self._takes_more:
            raise SlipstreamError(
                f"layers of {self.model.config.model_type!r} take more than hidden states from other stages, which "
                "plans and accounts of memory don't count. Name schedule, slices and partition, and give no "
                "memory.limit."
            )

    @property
    def graph_obstacle(self) -> str | None:
        """See `PipelineStage`."""
        hooked = (
            f"{name} has hooks, which are Python"
            for name, parameter in self.named_parameters()
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        )
        return next(hooked, None)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under the unsplit model's names, shared weights once under the canonical name."""
        named = self.model.named_parameters(remove_duplicate=False)
        parameters = {self._canonical.get(name, name): p for name, p in named if name not in self._second_names}
        return iter(parameters.items())

    def state(self) -> dict[str, Tensor]:
        """Returns this stage's part of the unsplit model's state dict, by the same names."""
        state = self.model.state_dict()
        return {name: t.detach() for name, t in state.items() if name not in self._second_names}

    def compute(
        self, token_slice: TokenSlice, inputs: Tensors, store: ContextStore, records_masks: bool = False
    ) -> Any:
        """Runs one slice through this stage.

        Args:
            token_slice: the tokens (b, T) and their positions.
            inputs: the message of the stage before, (b, T, hidden) first; none on the first stage, unless the rows of a
                spread embedding made it.
            store: keys and values of the microbatch's slices; this slice's are added.
            records_masks: whether this is the first forward, which learns the model's masks.

        Returns:
            The message to the next stage, (b, T, hidden) first, or on the last stage with a whole head the logits
            (b, T, vocabulary), or HeadTiles in their place.
        """
        hidden = inputs[0] if inputs else None
        context = SliceContext(token_slice, store, self.tables, hidden, self.attends_itself, records_masks)
        context.received = inputs[1:]
        if self._tensor is not None:
            context.tensor_rank = self._tensor.rank
        if self._exchange is not None:
            context.exchange = self._exchange(token_slice.parts)
        past = self._past(context)
        positions = token_slice.position_ids
        num_keys = token_slice.end if self.attends_itself else token_slice.input_ids.shape[1]
        with self._running(context):
            self._seeds.enter(-1)
            run: Any = self.model if self._tiled_head is None else self._tiled_head.hidden
            output = run(
                input_ids=token_slice.input_ids,
                # without it transformers looks for packed documents, which waits until the GPU is idle
                attention_mask=token_slice.input_ids.new_ones(len(token_slice.input_ids), num_keys, dtype=torch.bool),
                position_ids=positions + self._first_position if self._first_position else positions,
                use_cache=False,
                **past,
                # Router logits of this stage's layers alone would give a wrong loss.
                **self._without_router_logits,
            )
        if context.num_masks != (first := len(self.tables.functions)):
            raise RuntimeError(f"the model built {context.num_masks} masks, {first} when it was first run")
        if self._tiled_head is not None:
            logits_of = partial(self._logits_of_tile, context.entered_layer())
            return HeadTiles(logits_of, output, self._tiled_head.num_tokens, store.is_repeated)
        if self.is_last:
            return output.logits if self.has_loss else (output.logits.to(self.hidden_dtype),)
        assert context.output is not None, f"the last of {self.owned} did not run"
        return context.output.to(self.hidden_dtype), *self._crossing.leaving(context, self.hidden_dtype)

    def _logits_of_tile(self, context: SliceContext, hidden: Tensor) -> Tensor:
        """Returns the logits (b, n, V) of some tokens of a slice, given their last hidden states (b, n, hidden)."""
        assert self._tiled_head is not None
        with self._running(context):
            self._seeds.enter(self.num_layers)
            ids = context.token_slice.input_ids
            return self._tiled_head.logits(hidden, input_ids=ids, use_cache=False, **self._without_router_logits)

    def _past(self, context: SliceContext) -> dict[str, SliceCache]:
        """Returns the cache as the model's argument."""
        tokens = context.token_slice
        carriers = [] if tokens.document_start is None else self.find_carriers()
        if not tokens.is_cut and not carriers:
            # A whole microbatch runs as in training without slices, and models then get no cache.
            return {}
        context.carries_states = True
        context.has_lone_tokens = tokens.input_ids.shape[1] == 1 or bool(carriers and has_lone_tokens(tokens))
        return {self._cache_name: SliceCache(context)}

    @contextmanager
    def _running(self, context: SliceContext) -> Iterator[None]:
        """Surrounds the code of the model that computes a slice, all of it or one layer again."""
        tokens = context.token_slice
        layers = dict(zip(self.layers_here, self.layers, strict=True))
        # The number of tokens is told now, as the first packed slice also runs a lone token.
        if self._tensor is not None:
            self._tensor.begin(tokens.input_ids.shape[1])
        as_masked = masks_and_biases(self.model, tokens) if self.attends_itself else masks_of_text()
        # else the model would run its code that generates text with the given cache
        as_trained = as_several_tokens(context, layers) if context.has_lone_tokens else nullcontext()
        with active_forward(context), as_trained, as_masked, self._seeds.forked():
            yield

    def _run_layer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs a layer's forward, and keeps only its inputs where it is recomputed."""
        context = current_slice()
        forward = self._recomputed[layer]
        if not torch.is_grad_enabled() or context.layer >= self.layers_here.start + self._recompute.num_layers:
            return forward(*args, **kwargs)
        store = context.store
        entered = context.entered_layer()
        store.keep_for_layers()

        def again(given: Any) -> None:
            args, kwargs = tree_map_only(SliceCache, lambda _: SliceCache(entered), given)
            with store.replay(), self._running(entered):
                self._seeds.enter(entered.layer)
                note_output(f"layer {entered.layer}", forward(*args, **kwargs))

        def run() -> Any:
            output = forward(*args, **kwargs)
            note_output(f"layer {entered.layer}", output)
            return output

        # a cache that doesn't know the tensors of this forward, whose graph keeps it
        arguments = tree_map_only(SliceCache, lambda _: SliceCache(entered), (args, kwargs))
        on_host = self._moved_inputs
        if on_host is not None:
            is_moved = context.layer < self.layers_here.start + on_host.num_layers
            on_host = on_host if is_moved and not context.token_slice.is_cut else None
        output = recompute_in_backward(run, again, arguments, self._recompute.is_checked, store.is_repeated, on_host)
        store.drop_lone_slices()
        return output

    def find_carriers(self) -> list[nn.Module]:
        """Returns the modules that carry states, which are reset at documents from now on; runs a token for it once."""
        if self._carriers is None:
            # the slice that finds them may be recorded, for instance to keep its matrix products, and its outputs noted
            with recorded_carriers(self.layers) as carriers, _disable_current_modes(), noting_outputs(None):
                self._run_token(2)
            for module in carriers:
                if module in self._recomputed:
                    # All documents at once are recomputed: a later one continues from what an earlier one leaves.
                    self._recomputed[module] = by_document(self._recomputed[module])
                else:
                    module.forward = by_document(module.forward)
            self._carriers = carriers
        return self._carriers

    def receives(self, token_slice: TokenSlice) -> tuple[TensorSpec, ...]:
        """Returns the tensors that come from the stage before, or from the rows of a spread embedding."""
        if self.is_first:
            return (self.embedded(token_slice),) if self.embeds_by_parts else ()
        return self.hidden(token_slice), *self._specs(self._crossing.received, token_slice)

    def sends(self, token_slice: TokenSlice) -> tuple[TensorSpec, ...]:
        """Returns the tensors that go to the next stage."""
        return () if self.has_loss else (self.hidden(token_slice), *self._specs(self._crossing.sent, token_slice))

    def hidden(self, token_slice: TokenSlice) -> TensorSpec:
        """Returns (b, T, hidden) of the hidden states in and out; T may be a part of the slice's tokens."""
        batch, length = token_slice.input_ids.shape
        here = self._tensor.local_length(length) if self._tensor else length
        return TensorSpec(self._form.shape(batch, here, token_slice.length), self.hidden_dtype)

    def _specs(self, crossing: Sequence[CrossingTensor], token_slice: TokenSlice) -> list[TensorSpec]:
        sizes = (*token_slice.input_ids.shape, token_slice.length)
        return [
            TensorSpec(tensor.sent_form.shape(*sizes), tensor.dtype or self.hidden_dtype, tensor.dtype is None)
            for tensor in crossing
        ]

    @property
    def embeds_by_parts(self) -> bool:
        """Whether the embedding's rows are spread over the ranks."""
        return self._embedded is not None

    def embedded(self, token_slice: TokenSlice) -> TensorSpec:
        """Returns the spec (b, T, hidden) of the embeddings by one rank's rows of a spread embedding."""
        assert self._embedded is not None
        return TensorSpec(torch.Size((*token_slice.input_ids.shape, *self._embedded.shape)), self._embedded.dtype)

    def rows_messages(self, op: Op, piece: TokenSlice, has_backward: bool) -> list[TensorSpec]:
        """Returns the tensors of a message: the head's input; statistics, and in training two gradients; the sums; or
        the embeddings."""
        if op is Op.E or op in BACKWARDS:
            return [self.embedded(piece)]
        hidden = self.hidden(piece)
        tokens = hidden.shape[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        statistics = TensorSpec(torch.Size((2, *tokens)), wide)
        gradients = [hidden, hidden] if has_backward else []
        return {Op.F: [hidden], Op.L: [TensorSpec(tokens, wide)], Op.V: [statistics, *gradients]}[op]

    def _watch(self, layers: list[nn.Module], anatomy: ModelAnatomy) -> None:
        for index in self.layers_here:
            is_whole = anatomy.obstacle([f"{anatomy.layers}.{index}"])
            if self._recompute.num_layers:
                self._recomputed[layers[index]] = forward = layers[index].forward
                layers[index].forward = wraps(forward)(partial(self._run_layer, layers[index]))
            self._seeds.watch(layers[index], index, second_half(layers[index], () if is_whole else anatomy.halves))
        ends = slice(1) if self.is_first else slice(-1, None)  # a placeholder next to the embedding, or the head
        here = self.layers_here or range(self.num_layers)[ends]
        if not self.is_first:
            # before the user's hooks, which see the output of the stage before
            layers[here[0]].register_forward_pre_hook(self._receive, with_kwargs=True, prepend=True)
        layers[here[-1]].register_forward_hook(self._leave_states)
        if self.is_last:
            layers[here[-1]].register_forward_hook(partial(self._seeds.enter, self.num_layers))
        elif here[-1] + 1 < self.num_layers:
            # not where the layer returns it, which is before its own backward hooks are put on it
            layers[here[-1] + 1].register_forward_pre_hook(self._keep_given, with_kwargs=True, prepend=True)
        else:
            layers[here[-1]].register_forward_hook(self._keep)

    def _receive(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        # In place of the placeholders' output.
        return with_hidden_states(args, kwargs, current_slice().hidden)

    def _leave_states(self, _layer: nn.Module, _args: Any, output: Any) -> Any:
        """Leaves the layers' carried states to the next slice."""
        context = current_slice()
        hidden = first_output(output)
        if context.states:
            hidden = context.leave_states(hidden)
        if context.router_sums and self._router_loss is not None:
            hidden = self._router_loss.finish_slice(context, hidden)
        return None if hidden is first_output(output) else with_first_output(output, hidden)

    def _keep_given(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current_slice().output = hidden_states(args, kwargs)

    def _keep(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        current_slice().output = first_output(output)

    def _run_token(self, length: int, records_masks: bool = False) -> None:
        """Runs the first token of a sequence of `length` tokens."""
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        token_slice = TokenSlice(zero, zero, None, start=0, length=length, max_position=length - 1)
        inputs = tuple(torch.zeros(s.shape, dtype=s.dtype, device=self._device) for s in self.receives(token_slice))
        with in_evaluation([self.model]), torch.no_grad(), kept_frequencies(self.model), running_alone():
            self.compute(token_slice, inputs, ContextStore(length), records_masks)


_BLOCK = 64  # tokens per random generator


def add_embedding_noise(stage: CausalLMStage, alpha: float, length: int) -> None:
    """Adds noise to the output of a first stage's embedding in training: uniform, of up to alpha over the square root
    of `length` times the width (NEFTune, Jain et al. 2023). Step, microbatch and token decide the draw."""

    def add(module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
        if not module.training:
            return embedded
        return embedded + _drawn(current_slice().token_slice, embedded, alpha / math.sqrt(length * embedded.shape[-1]))

    stage.model.get_input_embeddings().register_forward_hook(add)


def _drawn(tokens: TokenSlice, like: Tensor, bound: float) -> Tensor:
    """Returns the noise of the slice's tokens here, (b, T, width), drawn in blocks that are the same in any slicing."""
    start = tokens.first
    first = start // _BLOCK
    last = (start + like.shape[1] - 1) // _BLOCK
    blocks = []
    for block in range(first, last + 1):
        seed = PlaceSeed(tokens.seed, ("embedding noise", tokens.microbatch, block))
        generator = current_draws().generator(like.device, seed)
        drawn = torch.empty(len(like), _BLOCK, like.shape[-1], device=like.device)
        blocks.append(drawn.uniform_(-bound, bound, generator=generator))
    begin = start - first * _BLOCK
    return torch.cat(blocks, dim=1)[:, begin : begin + like.shape[1]].to(like.dtype)
