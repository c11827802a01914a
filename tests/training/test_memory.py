"""What a step holds at once grows with the draft vocabulary and the chunk, not with the number of tokens times V."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specheads.training import DraftTraining

from ..tiny import tiny
from .tools import batch_of, new_head, training_of

VOCAB, DRAFT_VOCAB, CHUNK = 2**17, 2**11, 4


class Live(TorchDispatchMode):
    """Follows how many bytes of tensors made meanwhile are alive.

    Args:
        weights: Were there before.
    """

    def __init__(self, weights: list[Tensor]):
        super().__init__()
        self.bytes = self.peak = self.largest = 0
        self.known: set[int] = {weight.untyped_storage()._cdata for weight in weights}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        outputs = function(*arguments, **(named or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                self._follow(output.untyped_storage())
        return outputs

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.bytes += size
        self.peak, self.largest = max(self.peak, self.bytes), max(self.largest, size)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size


def held(training: DraftTraining, tokens: int) -> Live:
    """What a step on texts of so many tokens holds."""
    batch = batch_of([torch.randint(3, VOCAB, (tokens,)).tolist()], [1])
    weights = [*training.parameters(), *training.teacher.target.parameters()]
    with Live(weights) as live:
        training(batch).loss_sum.backward()
    training.zero_grad()
    return live


@pytest.mark.parametrize("name", ["eagle 3", "medusa"])
def test_memory_of_a_step(name: str) -> None:
    target = tiny("llama", VOCAB, hidden_size=16, num_attention_heads=2, num_key_value_heads=1).float()
    head = new_head(target, name, draft_tokens=range(0, VOCAB, VOCAB // DRAFT_VOCAB))
    training = training_of(head, target, depth=2, chunk_roots=CHUNK)
    short, long = held(training, 24), held(training, 48)
    # No tensor has logits of more places than a chunk judges; 4 bytes each.
    assert long.largest <= 4 * VOCAB * (CHUNK + 2)
    one_row = 4 * VOCAB
    assert long.peak - short.peak < one_row  # 24 tokens more cost less than the logits of one
    whole = held(training_of(head, target, depth=2, chunk_roots=48), 48)
    assert whole.peak > long.peak + 30 * one_row


def test_memory_grows_with_the_draft_vocabulary() -> None:
    target = tiny("llama", VOCAB, hidden_size=16, num_attention_heads=2, num_key_value_heads=1).float()

    def peak(size: int) -> int:
        head = new_head(target, "eagle 3", draft_tokens=range(0, VOCAB, VOCAB // size))
        return held(training_of(head, target, depth=2, chunk_roots=CHUNK), 24).peak

    assert peak(2**9) < peak(2**14) < peak(2**16)
