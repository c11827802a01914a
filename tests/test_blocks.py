"""What is found by way of blocks is what a full search finds."""

from __future__ import annotations

import pytest
import torch
from transformers import TopKLogitsWarper

from specheads.blocks import BLOCK, best_token, best_tokens, block_maxima, block_sums, inside_block, keep_best


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
    monkeypatch.setattr("specheads.blocks.block_maxima", None)
    assert torch.equal(best_token(logits, maxima), expected[..., 0])
    assert torch.equal(best_tokens(logits, 8, maxima), expected)


@pytest.mark.parametrize("vocab_size", [5, BLOCK, 3 * BLOCK + 5])
def test_sums_and_insides_of_blocks(vocab_size: int) -> None:
    weights = torch.rand(2, vocab_size, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([weights, weights.new_zeros(2, BLOCK)], dim=1)
    sums = block_sums(weights)
    torch.testing.assert_close(sums.sum(dim=1), weights.sum(dim=1))
    for block in range(sums.shape[1]):
        inside = padded[:, block * BLOCK : (block + 1) * BLOCK] if block * BLOCK < vocab_size else padded[:, -BLOCK:]
        assert torch.equal(inside_block(weights, torch.tensor([[block], [block]])), inside)
        torch.testing.assert_close(sums[:, block], inside.sum(dim=1))


def kept(kind: str, vocab_size: int) -> torch.Tensor:
    """Scores `[6, V]`: distinct ones, some equal or NaN or almost all ruled out."""
    generator = torch.Generator().manual_seed(vocab_size)
    scores = torch.randn(6, vocab_size, generator=generator)
    if kind == "equal":
        scores = (scores * 8).round()
    if kind == "equal beyond the blocks":  # one block holds the last that is kept, two more an equal one
        scores[:, [5, 7 * BLOCK, 9 * BLOCK]] = scores.topk(8, dim=-1).values[:, -1:]
    if kind == "nan":
        scores[3, :: vocab_size // 3] = torch.nan
    if kind == "ruled out":
        scores[2, 3:] = -torch.inf
    return scores


@pytest.mark.parametrize("vocab_size", [12, 16 * BLOCK, 40 * BLOCK, 40 * BLOCK + 5])
@pytest.mark.parametrize("kind", ["distinct", "equal", "equal beyond the blocks", "nan", "ruled out"])
def test_what_is_kept_is_what_the_processor_keeps(kind: str, vocab_size: int) -> None:
    scores = kept(kind if vocab_size > 12 else "distinct", vocab_size)
    quick = keep_best(scores, 8)
    expected = TopKLogitsWarper(8)(None, scores)
    assert quick is None or torch.equal(quick.nan_to_num(7.0, neginf=-9.0), expected.nan_to_num(7.0, neginf=-9.0))
    if kind == "distinct":
        assert (quick is None) == (vocab_size <= 16 * BLOCK)
    if kind.startswith("equal"):
        assert quick is None  # it would have to look for the others


def test_without_its_look_at_the_next_block_it_would_lose_equal_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = kept("equal beyond the blocks", 40 * BLOCK)
    monkeypatch.setattr(torch.Tensor, "all", lambda self: True)
    wrong = keep_best(scores, 8)
    assert wrong is not None and not torch.equal(wrong, TopKLogitsWarper(8)(None, scores))
