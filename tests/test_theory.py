"""The formulas against published values, and against what they are short for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specheads.theory import best_draft_length, expected_tokens, operations_factor, speedup

# α: tokens of a round by K
TOKENS = {
    0.5: {1: 1.5, 2: 1.75, 3: 1.875, 5: 1.969, 10: 1.999},
    0.8: {1: 1.8, 2: 2.44, 3: 2.952, 4: 3.362, 5: 3.689, 7: 4.161, 10: 4.571, 16: 4.887},
    0.95: {1: 1.95, 4: 4.524, 7: 6.732, 16: 11.638},
}
# (α, c): the best K and its speed-up
BEST = {
    (0.5, 0.01): (5, 1.88), (0.8, 0.01): (14, 4.23), (0.95, 0.01): (40, 12.5), (0.6, 0.05): (4, 1.92), (0.8, 0.05): (8, 3.09),
    (0.9, 0.1): (10, 3.43), (0.5, 0.2): (1, 1.25), (0.8, 0.3): (3, 1.55), (0.95, 0.3): (8, 2.18),
}  # fmt: skip


def test_published_values() -> None:
    for alpha, by_length in TOKENS.items():
        for k, tokens in by_length.items():
            assert expected_tokens(alpha, k) == pytest.approx(tokens, abs=5e-4)
    for (alpha, c), (k, times) in BEST.items():
        assert best_draft_length(alpha, c) == k
        assert speedup(alpha, k, c) == pytest.approx(times, rel=4e-3)
    # The paper's table of operations and speed at c = ĉ = 0, and one value with a cost.
    for alpha, k, operations, times in ((0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69)):
        assert operations_factor(alpha, k, 0) == pytest.approx(operations, abs=5e-3)
        assert speedup(alpha, k, 0) == pytest.approx(times, abs=5e-3)
    assert operations_factor(0.8, 5, 0.05) == pytest.approx(1.694, abs=5e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.77, 1.0])
def test_the_sum_that_it_is_short_for(alpha: float) -> None:
    for k in range(8):
        assert expected_tokens(alpha, k) == pytest.approx(sum(alpha**position for position in range(k + 1)))


def test_drafting_pays_from_an_acceptance_of_what_it_costs() -> None:
    for c in (0.05, 0.2, 0.6):
        assert best_draft_length(c - 0.01, c) == best_draft_length(c, c) == 0
        best = best_draft_length(c + 0.01, c)
        assert best >= 1
        assert speedup(c + 0.01, best, c) >= (1 + c + 0.01) / (1 + c) - 1e-12
    every = [speedup(0.85, k, 0.07) for k in range(60)]
    assert every.index(max(every)) == best_draft_length(0.85, 0.07)


def test_what_is_out_of_range_is_refused() -> None:
    for call in (
        lambda: expected_tokens(1.1, 2),
        lambda: expected_tokens(0.5, -1),
        lambda: speedup(0.5, 2, -0.1),
        lambda: operations_factor(0.5, 2, float("nan")),
        lambda: best_draft_length(1.0, 0.1),
        lambda: best_draft_length(0.8, 0.0),
    ):
        with pytest.raises(ValueError, match=r"must be|no best length"):
            call()


def test_the_picture_shows_the_published_values() -> None:
    plot = pytest.importorskip("specheads.evaluation.theory_plot")
    tokens, speed = plot.tokens_by_length(), plot.speed_by_length()
    for alpha, by_length in TOKENS.items():
        for k, value in by_length.items():
            if alpha in tokens:
                assert tokens[alpha][k] == pytest.approx(value, abs=5e-4)
    shown = {(0.8, c): times for (alpha, c), (_, times) in BEST.items() if alpha == plot.RATE and c in speed}
    assert len(shown) == 3
    for (_, c), times in shown.items():
        assert max(speed[c]) == pytest.approx(times, rel=4e-3)


def test_the_picture_of_the_docs_is_the_one_that_is_drawn(tmp_path: Path) -> None:
    plot = pytest.importorskip("specheads.evaluation.theory_plot")
    plot.main(tmp_path / "theory.svg")
    drawn = (tmp_path / "theory.svg").read_bytes()
    assert drawn == plot.draw()
    kept = (Path(__file__).parents[1] / "docs/images/theory.svg").read_text(encoding="utf-8")
    # Not byte by byte: matplotlib's versions write alike, and not the same.
    words = re.compile(r"<text[^>]*>([^<]*)</text>")
    assert words.findall(kept) == words.findall(drawn.decode())
    assert {"α = 0.8", "c = 0.05", "tokens per round"} <= set(words.findall(kept))
