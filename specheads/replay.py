"""Targets with a state that cannot be shortened: linear attention, state spaces, short convolutions.

The state of the last commit is kept aside. Where a draft is rejected it is put back, and the accepted tokens are fed again with
the next draft, in the same pass. When they have become many, a round goes without a draft: all that it feeds stays.

Shapes: B rows, P columns of the prompt, n tokens of a pass, R accepted tokens to be fed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .stock_forward import StockForward, column_mask
from .target import ModelRunner, Pass, Prompt

# With more tokens than this to be fed again, a round goes without a draft.
MOST_REPLAYED = 24


class ReplayRunner(ModelRunner):
    """A stateful model and its stock cache; rows go in step, drafts are chains.

    Args:
        inputs: What else every pass needs.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, prompt: Prompt, inputs: dict[str, Any]):
        super().__init__(model, cache, prompt)
        self.forward = StockForward(model, cache, inputs)
        self.hidden = prompt.hidden
        self.offset = prompt.next_position - prompt.columns
        self.committed = prompt.columns
        self.batch_size = self.offset.shape[-2]
        self.replayed = torch.empty(self.batch_size, 0, dtype=torch.long, device=self.offset.device)
        self.round = self.replayed
        self.written = 0
        self.saved = Snapshot(cache)

    @property
    def lengths(self) -> list[int]:
        """Per row, how many tokens are committed; the last of them may have to be fed again."""
        return [self.committed] * self.batch_size

    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Pass:
        """One pass over some tokens of a chain, after those to be fed again."""
        tokens = tokens.to(self.round.device)
        first = 0 if self.written else self.replayed.shape[1]
        if not self.written:
            self.saved = Snapshot(self.stock_cache)
        outputs = self._feed(torch.cat([self.replayed, tokens], dim=1) if first else tokens)
        self.round = torch.cat([self.round, tokens], dim=1)
        self.written += tokens.shape[1]
        return Pass.of(outputs, first)

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Ends the round; all rows keep the same tokens."""
        count = len(kept[0])
        if count < self.written:
            self.saved.restore(self.stock_cache)
            self.replayed = torch.cat([self.replayed, self.round[:, :count]], dim=1)
        elif count:
            self.replayed = self.replayed[:, :0]
        self.committed += count
        self.round, self.written = self.round[:, :0], 0
        self.must_rest = self.replayed.shape[1] > MOST_REPLAYED

    def rewind(self, lengths: Sequence[int]) -> None:
        """Rows in step have nothing to forget."""
        assert list(lengths) == self.lengths

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Rows in step stay together."""
        raise AssertionError("rows in step stay together")

    def give_back(self) -> Cache:
        """The stock cache, with all that was committed."""
        if self.written:
            self.commit([[]])
        if self.replayed.shape[1]:
            self._feed(self.replayed)
            self.replayed = self.replayed[:, :0]
        return self.stock_cache

    def reopen(self) -> list[int]:
        """All rows are there."""
        return list(range(self.batch_size))

    def windows(self) -> list[int | None]:
        """The sliding window of each attention layer."""
        return [getattr(layer, "sliding_window", None) for layer in self.stock_cache.layers if hasattr(layer, "keys")]

    def end(self) -> int:
        """The column after the last one that the round's passes saw."""
        return self.committed + self.written

    def _feed(self, tokens: Tensor) -> Any:
        start = self.committed + self.written - (0 if self.written else self.replayed.shape[1])
        end = start + tokens.shape[1]
        positions = self.offset + torch.arange(start, end, device=tokens.device)
        return self.forward(tokens, positions, column_mask(self.hidden, end))


class Snapshot:
    """What a stock cache holds at one moment.

    Keys and values are replaced when a layer grows, so they are only referred to; states are overwritten, so they are copied.
    """

    def __init__(self, cache: Cache):
        self.layers = [{name: _kept(value) for name, value in vars(layer).items()} for layer in cache.layers]

    def restore(self, cache: Cache) -> None:
        """Puts it back."""
        for layer, kept in zip(cache.layers, self.layers, strict=True):
            vars(layer).clear()
            vars(layer).update(kept)


def _kept(value: Any) -> Any:
    if isinstance(value, dict):  # the states of a layer, by index
        return {key: state.clone() if isinstance(state, Tensor) else state for key, state in value.items()}
    return value
