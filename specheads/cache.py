"""SlotCache: keys and values of the target, one slot per position, rows of different lengths.

A stock model writes into it through `update` and reads back what it may attend to. Rows start at slot 0, padding dropped, so
a row's slot is its position. A round writes its nodes into the slots after each row's length; what is rejected is forgotten
by not counting it, a path through a tree is kept by moving its slots together. Nothing is copied that grows with the
sequence.

Shapes: B rows, H key-value heads, S slots, D head dimension, n tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

# Room is taken at once for this many tokens, then in doubling steps: the buffers move at most a few times in a call.
FIRST_CAPACITY = 4096


class Layout:
    """Where the rows stand; shared by all layers."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self.device = device
        self.set_lengths(list(lengths))
        self.written = 0

    def set_lengths(self, lengths: list[int]) -> None:
        """Takes the committed length of each row."""
        self.lengths = lengths
        self.length_tensor = torch.tensor(lengths, dtype=torch.long, device=self.device)
        self.is_uniform = len(set(lengths)) <= 1
        self.slots: Tensor | None = None

    def open(self, written: int, size: int) -> None:
        """Announces a pass that writes `size` tokens behind each row's length and `written` earlier ones of the round."""
        self.written, self.size = written, size
        self.begin = self.lengths[0] + written
        self.end = max(self.lengths) + written + size
        if not self.is_uniform:
            self.slots = self.length_tensor[:, None] + torch.arange(written, written + size, device=self.device)

    def first(self, window: int | None) -> int:
        """The first slot that a layer with this sliding window still reads."""
        return 0 if window is None else max(0, min(self.lengths) - window + 1)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values.

    Args:
        keys: `[B, H, S, D]` buffer.
        values: `[B, H, S, D']` buffer.
        layout: Where the rows stand.
        window: The sliding window in tokens, `None` for full attention.
    """

    is_compileable = False

    def __init__(self, keys: Tensor, values: Tensor, layout: Layout, window: int | None):
        super().__init__()
        self.keys, self.values = keys, values
        self.layout = layout
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the pass's keys and values `[B, H, n, D]` and returns all that it may attend to `[B, H, L, D]`."""
        layout = self.layout
        if layout.is_uniform:
            slots = slice(layout.begin, layout.begin + layout.size)
            self.keys[:, :, slots] = key_states
            self.values[:, :, slots] = value_states
        else:
            assert layout.slots is not None
            index = layout.slots[:, None, :, None].to(key_states.device)
            self.keys.scatter_(2, index.expand_as(key_states), key_states)
            self.values.scatter_(2, index.expand_as(value_states), value_states)
        visible = slice(layout.first(self.window), layout.end)
        return self.keys[:, :, visible], self.values[:, :, visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` returns."""
        first = self.layout.first(self.window)
        return self.layout.end - first, first

    def get_seq_length(self) -> int:
        """The number of slots in use before the pass."""
        return max(self.layout.lengths) + self.layout.written

    def get_max_length(self) -> int:
        """No bound: the buffers grow."""
        return -1

    get_max_cache_shape = get_max_length

    def grow(self, slots: int) -> None:
        """Makes room for at least `slots` slots."""
        self.keys, self.values = _grown(self.keys, slots), _grown(self.values, slots)

    def keep_rows(self, moves: Sequence[tuple[int, int]], count: int) -> None:
        """Moves rows `(from, to)` and drops those from `count` on."""
        for buffer in (self.keys, self.values):
            for old, new in moves:
                buffer[new] = buffer[old]
        self.keys, self.values = self.keys[:count], self.values[:count]

    def gather_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Moves slots `sources` `[B, D]` of each row to `targets` `[B, D]`."""
        for buffer in (self.keys, self.values):
            shape = (-1, buffer.shape[1], -1, buffer.shape[3])
            moved = buffer.gather(2, sources[:, None, :, None].to(buffer.device).expand(shape))
            buffer.scatter_(2, targets[:, None, :, None].to(buffer.device).expand(shape), moved)


class SlotCache(Cache):
    """Keys and values of all layers.

    Args:
        layers: One `SlotLayer` per attention layer, of one `layout`.
        layout: Where the rows stand.
    """

    def __init__(self, layers: list[SlotLayer], layout: Layout):
        super().__init__(layers=list(layers))
        self.slot_layers = layers
        self.layout = layout

    @classmethod
    def adopt(cls, cache: Cache, mask: Tensor | None, tokens: int) -> SlotCache:
        """Takes over what a stock cache holds after the prompt, dropping padding. The stock cache is emptied.

        Args:
            cache: A `DynamicCache`, filled.
            mask: `[B, P]` 1 for the prompt's tokens, 0 for padding; `None` if there is no padding.
            tokens: How many more slots a row may need.
        """
        prompt = cache.get_seq_length()
        batch_size = cache.layers[0].keys.shape[0]
        lengths = [prompt] * batch_size if mask is None else mask.sum(dim=1).tolist()
        layout = Layout(lengths, cache.layers[0].keys.device)
        capacity = max(lengths) + min(tokens, FIRST_CAPACITY)
        places = None if mask is None or min(lengths) == prompt else [row.nonzero().flatten() for row in mask]
        layers = []
        for layer in cache.layers:
            window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
            keys = _adopted(layer.keys, places, prompt, capacity)
            values = _adopted(layer.values, places, prompt, capacity)
            layer.keys = layer.values = None
            layers.append(SlotLayer(keys, values, layout, window))
        return cls(layers, layout)

    def open(self, written: int, size: int) -> None:
        """Prepares a pass of `size` tokens, after `written` tokens of the same round."""
        self.layout.open(written, size)
        for layer in self.slot_layers:
            if layer.keys.shape[2] < self.layout.end:
                layer.grow(self.layout.end)

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keeps some of the round's slots and forgets the others.

        Args:
            kept: Per row, the round's slots to keep, increasing; slot 0 is the first that the round wrote.
        """
        if any(list(slots) != list(range(len(slots))) for slots in kept):
            longest = max(len(slots) for slots in kept)
            # Rows with fewer slots move their next slot onto itself, which changes nothing.
            sources = [[*slots, *range(len(slots), longest)] for slots in kept]
            base = self.layout.length_tensor[:, None]
            moved = base + torch.tensor(sources, device=base.device)
            targets = base + torch.arange(longest, device=base.device)
            for layer in self.slot_layers:
                layer.gather_slots(moved, targets)
        self.layout.set_lengths([length + len(slots) for length, slots in zip(self.layout.lengths, kept, strict=True)])
        self.layout.written = 0

    def rewind(self, lengths: Sequence[int]) -> None:
        """Shortens rows to the given lengths."""
        self.layout.set_lengths(list(lengths))

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Keeps some rows, in the order given: `kept[i]` becomes row i. Only rows that change place are copied."""
        moves = [(old, new) for new, old in enumerate(kept) if old != new]
        for layer in self.slot_layers:
            layer.keep_rows(moves, len(kept))
        self.layout.set_lengths([self.layout.lengths[row] for row in kept])


def _adopted(states: Tensor, places: list[Tensor] | None, prompt: int, capacity: int) -> Tensor:
    """A buffer `[B, H, capacity, D]` with the states `[B, H, T, D]` of the prompt's last T columns in their slots."""
    batch_size, heads, held, width = states.shape
    # Zeros, not whatever the memory held: a slot that no row has written may be read under the mask, where 0 * NaN is NaN.
    buffer = states.new_zeros(batch_size, heads, capacity, width)
    skipped = prompt - held  # a sliding layer holds the end of the prompt only
    if places is None:
        buffer[:, :, skipped:prompt] = states
        return buffer
    for row, columns in enumerate(places):
        inside = columns >= skipped
        slots = inside.nonzero().flatten()
        buffer[row, :, slots] = states[row, :, columns[inside] - skipped]
    return buffer


def _grown(buffer: Tensor, slots: int) -> Tensor:
    batch_size, heads, capacity, width = buffer.shape
    grown = buffer.new_zeros(batch_size, heads, max(slots, 2 * capacity), width)
    grown[:, :, :capacity] = buffer
    return grown
