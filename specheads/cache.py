"""SlotCache: keys and values of the target, one slot per column of the text, rows of different lengths.

A stock model writes into it through `update` and reads back what it may attend to. Slots are the columns that plain decoding
would fill, padding included. A round writes its nodes into the slots after each row's length; what is rejected is forgotten
by not counting it, a path through a tree is kept by moving its slots together. Nothing is copied that grows with the
sequence. Rows that have finished stay behind those that go on, so that all can be given back at the end.

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

    Attributes:
        buffers: Keys and values of all rows; `keys` and `values` show the lines that go on.
    """

    is_compileable = False

    def __init__(self, keys: Tensor, values: Tensor, layout: Layout, window: int | None):
        super().__init__()
        self.buffers = (keys, values)
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
        count = self.keys.shape[0]
        self.buffers = (_grown(self.buffers[0], slots), _grown(self.buffers[1], slots))
        self.show(count)

    def show(self, count: int) -> None:
        """Shows the first `count` lines to the model."""
        self.keys, self.values = (buffer[:count] for buffer in self.buffers)

    def swap_lines(self, swaps: Sequence[tuple[int, int]]) -> None:
        """Exchanges pairs of lines."""
        for buffer in self.buffers:
            for one, other in swaps:
                buffer[[one, other]] = buffer[[other, one]]


class SlotCache(Cache):
    """Keys and values of all layers.

    Args:
        layers: One `SlotLayer` per attention layer, of one `layout`; a layer that the model does not use as it is.
        layout: Where the rows stand.
    """

    def __init__(self, layers: list[Any], layout: Layout):
        super().__init__(layers=list(layers))
        self.slot_layers = [layer for layer in layers if isinstance(layer, SlotLayer)]
        self.layout = layout
        self.order = list(range(len(layout.lengths)))  # the batch row of each line of the buffers
        self.left = [0] * len(layout.lengths)  # the length with which each batch row left
        self.going = len(layout.lengths)  # how many lines go on; others may be shown for a pass

    @classmethod
    def adopt(cls, cache: Cache, tokens: int) -> SlotCache:
        """Takes over what a stock cache holds after the prompt. The stock cache is emptied.

        Args:
            cache: A `DynamicCache`, filled.
            tokens: How many more slots a row may need.
        """
        prompt = cache.get_seq_length()
        used = next(layer.keys for layer in cache.layers if layer.keys is not None)
        layout = Layout([prompt] * len(used), used.device)
        capacity = prompt + min(tokens, FIRST_CAPACITY)
        layers: list[Any] = []
        for layer in cache.layers:
            if layer.keys is None:
                layers.append(layer)
                continue
            window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
            keys, values = (_adopted(states, prompt, capacity) for states in (layer.keys, layer.values))
            layer.keys = layer.values = None
            layers.append(SlotLayer(keys, values, layout, window))
        return cls(layers, layout)

    def give_back(self, cache: Cache, length: int) -> None:
        """Fills the stock cache that was taken over.

        Args:
            cache: The cache.
            length: How many tokens it is to hold; no row has fewer.
        """
        lines = None
        if self.order != sorted(self.order):
            lines = [self.order.index(row) for row in range(len(self.order))]
        for own, layer in zip(self.layers, cache.layers, strict=True):
            if not isinstance(own, SlotLayer):
                continue
            start = 0 if own.window is None else max(0, length - own.window + 1)
            held = [buffer[:, :, start:length] for buffer in own.buffers]
            # Copies: a stock layer is not to hold the room that was taken beyond its end.
            layer.keys, layer.values = (part.clone() if lines is None else part[lines] for part in held)
            if own.window is not None:
                layer.cumulative_length = length

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
            self._move(moved, targets)
        self.layout.set_lengths([length + len(slots) for length, slots in zip(self.layout.lengths, kept, strict=True)])
        self.layout.written = 0

    def rewind(self, lengths: Sequence[int]) -> None:
        """Shortens rows to the given lengths."""
        self.layout.set_lengths(list(lengths))

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Goes on with some lines: `kept[i]` becomes line i. Only lines that change place are moved.

        Args:
            kept: The lines, such that each stays or takes the place of one that does not go on.
        """
        self._note_lengths()
        swaps = [(old, new) for new, old in enumerate(kept) if old != new]
        for old, new in swaps:
            self.order[old], self.order[new] = self.order[new], self.order[old]
        for layer in self.slot_layers:
            layer.swap_lines(swaps)
            layer.show(len(kept))
        self.going = len(kept)
        self.layout.set_lengths([self.layout.lengths[line] for line in kept])

    def show(self, lines: int) -> None:
        """Shows so many lines to the model: for a pass also some that have left, which write behind what they have committed.

        Args:
            lines: How many; those that go on are among them.
        """
        going = self.layout.lengths[:lines]
        left = [max(self.left[row], going[0]) for row in self.order[len(going) : lines]]
        for layer in self.slot_layers:
            layer.show(lines)
        self.layout.set_lengths([*going, *left])

    def reopen(self) -> None:
        """Brings back all lines, those of finished rows too, with what each has committed."""
        self._note_lengths()
        for layer in self.slot_layers:
            layer.show(len(self.order))
        self.going = len(self.order)
        self.layout.set_lengths([self.left[row] for row in self.order])

    def _move(self, sources: Tensor, targets: Tensor) -> None:
        """Moves slots `sources` `[B, D]` of each row to `targets` `[B, D]`."""
        indices: dict[Any, tuple[Tensor, Tensor]] = {}  # mostly the same ones for all layers
        for layer in self.slot_layers:
            for buffer in (layer.keys, layer.values):
                heads, width = buffer.shape[1], buffer.shape[3]
                kind = (buffer.device, heads, width)
                if kind not in indices:
                    source, target = (slots[:, None, :, None].to(buffer.device) for slots in (sources, targets))
                    indices[kind] = source.expand(-1, heads, -1, width), target.expand(-1, heads, -1, width)
                source, target = indices[kind]
                buffer.scatter_(2, target, buffer.gather(2, source))

    def _note_lengths(self) -> None:
        for line, length in enumerate(self.layout.lengths[: self.going]):
            self.left[self.order[line]] = length


def _adopted(states: Tensor, prompt: int, capacity: int) -> Tensor:
    """A buffer `[B, H, capacity, D]` with the states `[B, H, T, D]` of the prompt's last T columns in their slots."""
    batch_size, heads, held, width = states.shape
    # Zeros, not whatever the memory held: a slot that no row has written may be read under the mask, where 0 * NaN is NaN.
    buffer = states.new_zeros(batch_size, heads, capacity, width)
    buffer[:, :, prompt - held : prompt] = states  # a sliding layer holds the end of the prompt only
    return buffer


def _grown(buffer: Tensor, slots: int) -> Tensor:
    batch_size, heads, capacity, width = buffer.shape
    grown = buffer.new_zeros(batch_size, heads, max(slots, 2 * capacity), width)
    grown[:, :, :capacity] = buffer
    return grown
