"""The most probable tokens, found by way of blocks, are those of a full search."""

from __future__ import annotations

import pytest
import torch

from specheads.best_tokens import BLOCK, best_token, best_tokens, block_maxima


@pytest.mark.parametrize("vocab_size", [7, 4096, 4097, 50257])
@pytest.mark.parametrize("kind", ["ties", "distinct", "nan", "all -inf"])
def test_the_most_probable_token_is_argmaxs(kind: str, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    values = {"ties": 3, "distinct": 10**6, "nan": 50, "all -inf": 3}[kind]
    for _ in range(10):
        scores = torch.randint(values, (4, 2, vocab_size), generator=generator).float()
        if kind == "nan":
            scores[torch.rand(scores.shape, generator=generator) < 2 / vocab_size] = torch.nan
        if kind == "all -inf":
            scores[1:] = -torch.inf
        assert torch.equal(best_token(scores), scores.argmax(dim=-1))


@pytest.mark.parametrize("vocab_size", [12, 16 * BLOCK, 40 * BLOCK + 5])
def test_the_best_tokens_are_those_of_a_full_search(vocab_size: int) -> None:
    logits = torch.randn(2, 3, vocab_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(best_tokens(logits, 8), logits.topk(8).indices)
    logits[..., 1:] = -torch.inf  # a processor may leave fewer than that many
    assert best_tokens(logits, 8)[0, 0].unique().numel() == 8
    assert (best_tokens(logits, 8)[..., 0] == 0).all()


def test_known_maxima_are_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 3, 80 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    maxima, expected = block_maxima(logits), logits.topk(8).indices
    monkeypatch.setattr("specheads.best_tokens.block_maxima", None)
    assert torch.equal(best_token(logits, maxima), expected[..., 0])
    assert torch.equal(best_tokens(logits, 8, maxima), expected)
