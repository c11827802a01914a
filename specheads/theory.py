"""What speculative decoding can bring, in closed form (Leviathan et al. 2023, arXiv 2211.17192).

All formulas take the acceptance rate α to be the same at every position and independent of the others, and the target's pass to
cost the same whatever its width. Real rates vary with the text, and the mean of these figures is not the figure of the mean.
"""

from __future__ import annotations

from itertools import count


def expected_tokens(alpha: float, k: int) -> float:
    """The tokens that a round of K drafted ones emits: 1 + α + ... + α^K (equation 1).

    Args:
        alpha: The acceptance rate, from 0 to 1.
        k: K, the tokens drafted.

    Raises:
        ValueError: if an argument is out of range.
    """
    _check(alpha, k)
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def speedup(alpha: float, k: int, c: float) -> float:
    """How many times faster than plain decoding it is (theorem 3.8).

    Args:
        alpha: The acceptance rate, from 0 to 1.
        k: K, the tokens drafted.
        c: The time to draft a token, in passes of the target over one token.

    Raises:
        ValueError: if an argument is out of range.
    """
    _check(alpha, k, c=c)
    return expected_tokens(alpha, k) / (k * c + 1)


def best_draft_length(alpha: float, c: float) -> int:
    """The K of the greatest speed-up, the least one if several are as good; 0 where drafting does not pay, which is α <= c.

    Args:
        alpha: The acceptance rate, from 0 to below 1.
        c: The time to draft a token, in passes of the target over one token; above 0.

    Raises:
        ValueError: if an argument is out of range; α = 1 and c = 0 are, as longer drafts are always better then.
    """
    _check(alpha, 0, c=c)
    if alpha == 1 or c == 0:
        raise ValueError(f"There is no best length if all is accepted, or drafting is free: got alpha={alpha}, c={c}.")
    # The speed-up rises up to its greatest value and falls from there.
    return next(k for k in count() if speedup(alpha, k + 1, c) <= speedup(alpha, k, c))


def operations_factor(alpha: float, k: int, c_hat: float) -> float:
    """How many times the arithmetic operations of plain decoding it takes for a token (theorem 3.11).

    Args:
        alpha: The acceptance rate, from 0 to 1.
        k: K, the tokens drafted.
        c_hat: The operations of the draft model for a token, in those of the target.

    Raises:
        ValueError: if an argument is out of range.
    """
    _check(alpha, k, c_hat=c_hat)
    return (k * c_hat + k + 1) / expected_tokens(alpha, k)


def _check(alpha: float, k: int, **costs: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"The acceptance rate must be from 0 to 1, got {alpha}.")
    if type(k) is not int or k < 0:
        raise ValueError(f"The number of drafted tokens must be an integer of at least 0, got {k}.")
    for name, cost in costs.items():
        if not cost >= 0:
            raise ValueError(f"The cost `{name}` must be at least 0, got {cost}.")
