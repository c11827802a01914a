"""A model with its cache behind one call: forward some nodes, keep a path, forget the rest.

Stock modelling code runs unchanged. Where a family takes a 4-D mask and explicit positions, a pass holds any tree for rows of
any lengths; where it derives positions or biases from the cache and a 2-D mask, rows go in step and drafts are chains.

Shapes: B rows, P columns of the prompt, n tokens of a pass, m tokens of a round so far, S slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from . import compat
from .cache import SlotCache
from .families import Family, family_of
from .few_rows import filled, filled_rows
from .stock_forward import StockForward, column_mask


@dataclass
class Prompt:
    """What later passes must know of the prompt's.

    Args:
        columns: P, as many as the cache holds.
        hidden: `[B, P]` bool: the columns that nothing attends to, for padding; `None` if there are none.
        next_position: `[..., B, 1]` the position of the first token after the prompt, as the model counts: some count in
            several dimensions at once.
    """

    columns: int
    hidden: Tensor | None
    next_position: Tensor

    @classmethod
    def of(cls, columns: int, batch_size: int, mask: Tensor | None, following: Tensor | None, device: torch.device) -> Prompt:
        """The prompt of a call.

        Args:
            columns: P.
            batch_size: B.
            mask: `[B, P]` attention mask, or `None`.
            following: `[..., B or 1, 1]` the position of the first token after the prompt; `None` if it is the number of the
                mask's ones.
            device: Where the model's passes run.
        """
        if following is not None:
            following = following.to(device).expand(*following.shape[:-2], batch_size, 1)
        elif mask is not None:
            following = mask.to(device).long().sum(dim=1, keepdim=True)
        else:
            following = torch.full((batch_size, 1), columns, device=device)
        hidden = None if mask is None or bool(mask.all()) else mask.to(device) == 0
        return cls(columns, hidden, following)


@dataclass
class Pass:
    """What a pass of a model gave.

    Args:
        logits: `[B, n, V]`.
        hidden_states: `[B, n, H]` before the first layer and after each one, `None` for those that were not asked for.
        attentions: `[B, heads, n, S]` per layer, if asked for.
        cross_attentions: `[B, heads, n, encoder length]` per layer, if asked for.
        probed: `[B, E, V]` logits after the probes of the draft (`tree.Probes`), if it had any.
    """

    logits: Tensor
    hidden_states: tuple[Tensor | None, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    probed: Tensor | None = None

    @classmethod
    def of(cls, outputs: Any, first: int = 0) -> Pass:
        """Reads a stock model's outputs, from its token `first` on."""
        prefix = "decoder_" if "decoder_hidden_states" in outputs or "decoder_attentions" in outputs else ""
        states, own = outputs.get(f"{prefix}hidden_states"), outputs.get(f"{prefix}attentions")
        across = outputs.get("cross_attentions")
        return cls(
            outputs.logits[:, first:],
            None if states is None else tuple(None if state is None else state[:, first:] for state in states),
            None if own is None else tuple(layer[:, :, first:] for layer in own),
            None if across is None else tuple(layer[:, :, first:] for layer in across),
        )

    def features(self, layers: Sequence[int]) -> Tensor | None:
        """Hidden states of some layers side by side `[B, n, L H]`; `None` for no layers.

        Raises:
            ValueError: if the pass did not give them.
        """
        if not layers:
            return None
        given = dict(enumerate(self.hidden_states or ()))
        states = [state.to(self.logits.device) for layer in layers if (state := given.get(layer)) is not None]
        if len(states) < len(layers):
            raise ValueError(
                f"The drafter reads the target's hidden states {list(layers)}, and a pass of the target gives {len(given)} of "
                "them, counted from 0; name others in its `feature_layers`."
            )
        return states[0] if len(states) == 1 else torch.cat(states, dim=-1)

    def first(self, rows: int, tokens: int) -> Pass:
        """What it gave for the first tokens of its first rows."""
        if (rows, tokens) == self.logits.shape[:2]:
            return self
        states, own, across = self.hidden_states, self.attentions, self.cross_attentions
        return Pass(
            self.logits[:rows, :tokens],
            None if states is None else tuple(None if state is None else state[:rows, :tokens] for state in states),
            None if own is None else tuple(layer[:rows, :, :tokens] for layer in own),
            None if across is None else tuple(layer[:rows, :, :tokens] for layer in across),
        )

    def without_probes(self, count: int) -> Pass:
        """What it gave for all but its last `count` tokens, and their logits apart."""
        size = self.logits.shape[1] - count
        return replace(self.first(self.logits.shape[0], size), probed=self.logits[:, size:])

    def last(self) -> Pass:
        """What it gave for its last token. A copy, so that the rest does not stay."""
        states = self.hidden_states
        return Pass(
            self.logits[:, -1:].clone(),
            None if states is None else tuple(None if state is None else state[:, -1:].clone() for state in states),
        )


class ModelRunner(ABC):
    """A model and the cache of one call.

    A round begins with `extend`, perhaps several times, each adding tokens behind what the rows have committed, and ends with
    `commit`, which keeps a path of them.

    Args:
        model: The model.
        cache: What the stock pass over the prompt left in its cache; taken over.
        prompt: What else that pass left behind.

    Attributes:
        written: How many tokens of the round each row has run on.
        lengths: Per line, how many columns are committed.
        must_rest: Whether the next round is to be one without a draft.
        fills: Whether a round's only pass is given more columns, which nothing looks at, or a row that has ended, where that is
            quicker (`few_rows`).
    """

    written: int
    must_rest = False
    fills = False

    def __init__(self, model: PreTrainedModel, cache: Cache, prompt: Prompt):
        self.model = model
        self.stock_cache = cache
        self.prompt = prompt

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Per line, how many columns are committed."""

    @abstractmethod
    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Pass:
        """One pass over some tokens behind what is committed.

        Args:
            tokens: `[B, n]`.
            depths: `[B, n]` position of each token, counted from the row's committed length.
            visible: `[B, n, m]` bool: which of the round's tokens, these n last, each token attends to.
        """

    @abstractmethod
    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Ends the round.

        Args:
            kept: Per row, which of the round's tokens stay, in order, as indices into what `extend` was given since the last
                commit.
        """

    @abstractmethod
    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets the ends of rows, down to the given lengths."""

    @abstractmethod
    def keep_rows(self, kept: Sequence[int]) -> None:
        """Goes on with some lines: `kept[i]` becomes line i."""

    @abstractmethod
    def reopen(self) -> list[int]:
        """Brings back all rows, those too that have left; returns the batch row of each line."""

    @abstractmethod
    def give_back(self) -> Cache:
        """Fills the stock cache with what every row has committed, and returns it."""

    @abstractmethod
    def windows(self) -> list[int | None]:
        """The sliding window of each attention layer."""

    @abstractmethod
    def end(self) -> int:
        """The slot after the last one that the round's passes saw."""

    def columns_attended(
        self, attentions: tuple[Tensor, ...] | None, line: int, path: Sequence[int]
    ) -> tuple[Tensor, ...] | None:
        """A pass's attention weights as plain decoding has them at a node: those of the columns that lead to it.

        Args:
            attentions: `[B, heads, n, S]` per layer.
            line: The line.
            path: The nodes from the root down to the one asked for.

        Returns:
            `[heads, n, columns]` per layer.
        """
        if attentions is None:
            return None
        start, end = self.lengths[line], self.end()
        slots = [*range(start), *(start + node for node in path)]
        picked = []
        for weights, window in zip(attentions, self.windows(), strict=True):
            first = end - weights.shape[-1]
            shown = slots if window is None else slots[-window:]
            picked.append(weights[line][:, :, [slot - first for slot in shown]])
        return tuple(picked)


class SlotRunner(ModelRunner):
    """A model whose keys and values are in a `SlotCache`.

    Args:
        family: What its forward accepts.
        tokens: How many more slots a row may need.
        inputs: What else every pass needs: for an encoder-decoder the encoder's outputs and mask, one line per row; and which
            outputs are asked for.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache, prompt: Prompt, family: Family, tokens: int, inputs: dict[str, Any]
    ):
        super().__init__(model, cache, prompt)
        self.family = family
        if isinstance(cache, EncoderDecoderCache):
            self.slots = SlotCache.adopt(cache.self_attention_cache, tokens)
            own: Cache = EncoderDecoderCache(self.slots, cache.cross_attention_cache)
        else:
            own = self.slots = SlotCache.adopt(cache, tokens)
        self.forward = StockForward(model, own, inputs)
        self.written = 0
        self.round_depths = torch.empty(0)
        self._follow_lines()

    @property
    def lengths(self) -> list[int]:
        """Per line, how many columns are committed."""
        return self.slots.layout.lengths

    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Pass:
        """One pass, of any tree for rows of any lengths where the family takes trees."""
        device, asked_on, asked = self.slots.layout.device, tokens.device, tokens.shape
        tokens, depths, visible = tokens.to(device), depths.to(device), visible.to(device)
        if self.fills:
            tokens, depths, visible = filled(tokens, depths, visible)
            tokens, depths, visible = self._with_ended_rows(tokens, depths, visible)
        self.slots.open(self.written, tokens.shape[1])
        self.round_depths = torch.cat([self.round_depths, depths], dim=1) if self.written else depths
        self.written += tokens.shape[1]
        positions = self.offset + (self.slots.layout.length_tensor[:, None] + depths)
        mask = self._masks(depths, visible) if self.family.takes_trees else self._columns()
        given = Pass.of(self.forward(tokens, positions, mask)).first(*asked)
        # A model on several devices may leave them on any.
        return replace(given, logits=given.logits.to(asked_on))

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Ends the round."""
        if len(kept) < len(self.lengths):
            self._show(len(kept))
        self.slots.commit(kept)
        self.written = 0

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forgets the ends of rows, down to the given lengths."""
        self.slots.rewind(lengths)

    def _with_ended_rows(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pass with as many rows as are quickest, if rows have ended: what one of them gives is not looked at."""
        rows = min(filled_rows(*tokens.shape), len(self.slots.order))
        if rows == len(tokens):
            return tokens, depths, visible
        self._show(rows)
        lines = torch.arange(rows, device=tokens.device).clamp(max=len(tokens) - 1)
        return tokens[lines], depths[lines], visible[lines]

    def _show(self, lines: int) -> None:
        self.slots.show(lines)
        self._follow_lines()

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Goes on with some lines: `kept[i]` becomes line i."""
        self.slots.keep_rows(kept)
        self._follow_lines()

    def reopen(self) -> list[int]:
        """Brings back all rows, those too that have left; returns the batch row of each line."""
        self.slots.reopen()
        self._follow_lines()
        return self.slots.order

    def windows(self) -> list[int | None]:
        """The sliding window of each attention layer."""
        return [layer.window for layer in self.slots.slot_layers]

    def end(self) -> int:
        """The slot after the last one that the round's passes saw."""
        return self.slots.layout.end

    def give_back(self) -> Cache:
        """Fills the stock cache with what every row has committed, and returns it."""
        stock = self.stock_cache
        self.slots.give_back(stock.self_attention_cache if isinstance(stock, EncoderDecoderCache) else stock, min(self.lengths))
        return stock

    def _follow_lines(self) -> None:
        """What is known of the prompt, in the order of the lines."""
        layout = self.slots.layout
        rows = torch.tensor(self.slots.order[: len(layout.lengths)], device=layout.device)
        hidden, columns = self.prompt.hidden, self.prompt.columns
        self.hidden = None if hidden is None else hidden.to(layout.device)[rows]
        # What a slot's position has beyond the slot.
        self.offset = (self.prompt.next_position.to(layout.device) - columns).index_select(-2, rows)

    def _masks(self, depths: Tensor, visible: Tensor) -> Any:
        """The additive mask `[B, 1, n, S]`, one per kind of layer where the family wants that; `None` if all is visible."""
        layout = self.slots.layout
        if depths.shape[1] == 1 and layout.is_uniform and self.written == 1 and self.hidden is None:
            # A single token per row behind rows of one length sees every slot, and the stock code takes its fastest way.
            return None
        windows = {layer.window for layer in self.slots.slot_layers}
        masks = {window: self._mask(window, depths, visible) for window in windows}
        if not self.family.masks_by_layer_type:
            (mask,) = masks.values()
            return mask
        return {"sliding_attention" if window else "full_attention": mask for window, mask in masks.items()}

    def _mask(self, window: int | None, depths: Tensor, visible: Tensor) -> Tensor:
        layout = self.slots.layout
        first, seen = layout.first(window), visible.shape[-1]
        dtype = self.model.dtype
        mask = torch.zeros(*depths.shape, layout.end - first, dtype=dtype, device=depths.device)
        if layout.is_uniform and window is None:
            # All that is committed, and then the round's own tokens.
            mask[:, :, -seen:].masked_fill_(~visible, torch.finfo(dtype).min)
        else:
            mask.masked_fill_(~self._allowed(window, depths, visible), torch.finfo(dtype).min)
        if self.hidden is not None and first < self.hidden.shape[1]:
            hidden = self.hidden[:, None, first:]
            mask[:, :, : hidden.shape[2]].masked_fill_(hidden, torch.finfo(dtype).min)
        return mask[:, None]

    def _allowed(self, window: int | None, depths: Tensor, visible: Tensor) -> Tensor:
        """`[B, n, S]` bool: which slots each token attends to, padding not yet hidden."""
        layout = self.slots.layout
        slots = torch.arange(layout.first(window), layout.end, device=depths.device)
        order = slots - layout.length_tensor[:, None]  # [B, S] negative: committed; else which token of the round
        seen = visible.shape[-1]
        index = order.clamp(0, seen - 1)[:, None].expand(-1, depths.shape[1], -1)
        allowed = (order < 0)[:, None] | (visible.gather(2, index) & (order < seen)[:, None])
        if window is not None:
            # A tree's nodes do not stand at the position of their slot, but at that of their depth.
            position = torch.where(order < 0, order, self.round_depths.gather(1, order.clamp(0, seen - 1)))
            allowed &= depths[:, :, None] - position[:, None] < window
        return allowed

    def _columns(self) -> Tensor | None:
        """The 2-D mask `[B, S]`; `None` without padding."""
        return column_mask(self.hidden, self.slots.layout.end)


def run_prompt(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, inputs: dict[str, Any], tokens: int, family: Family | None = None
) -> ModelRunner:
    """Runs a model over a prompt from scratch; for draft models, whose prompt `generate` does not prepare.

    Args:
        model: The model.
        ids: `[B, P]` prompt, padded or not.
        mask: `[B, P]` its attention mask, or `None`.
        inputs: What every pass needs besides (see `ModelRunner`).
        tokens: How many more slots a row may need.
        family: What the model's forward accepts, if it is not to be looked up.
    """
    cache = compat.new_cache(model)
    arguments = dict(inputs)
    if model._supports_logits_to_keep():
        arguments["logits_to_keep"] = 1
    forward = StockForward(model, cache, arguments)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if mask is not None:
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    outputs = forward(ids, positions, mask)
    prompt = Prompt.of(ids.shape[1], ids.shape[0], mask, None, ids.device)
    return make_runner(model, compat.cache_of(model, outputs), prompt, family or family_of(model), tokens, inputs)


def make_runner(
    model: PreTrainedModel, cache: Cache, prompt: Prompt, family: Family, tokens: int, inputs: dict[str, Any]
) -> ModelRunner:
    """The runner for a family (see `SlotRunner` for the arguments)."""
    if family.is_stateful:
        from .replay import ReplayRunner

        return ReplayRunner(model, cache, prompt, inputs)
    return SlotRunner(model, cache, prompt, family, tokens, inputs)
