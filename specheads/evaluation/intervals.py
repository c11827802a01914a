"""Figures over prompts with bootstrap intervals, speeds compared prompt by prompt among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
COVERAGE = 0.95
FEW = 5

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval.

    Args:
        value: The figure.
        low: The lower end; `None` if there are fewer than two pairs.
        high: The upper end, likewise.
    """

    value: float
    low: float | None = None
    high: float | None = None


def median_ratio(speeds: Sequence[float], plain: Sequence[float], seed: int = 0) -> Interval:
    """The median over pairs of speed divided by plain speed.

    Args:
        speeds: Tokens per second of each prompt (or batch).
        plain: Those of plain `generate` for the same prompts, in the same order.
        seed: Of the resampling.

    Raises:
        ValueError: if there is no pair, or if the lengths differ.
    """
    ratios = _array(speeds) / _array(plain)
    if ratios.size == 0:
        raise ValueError("A ratio needs at least one pair of runs.")
    value = float(np.median(ratios))
    if ratios.size < 2:
        return Interval(value)
    return _percentiles(value, np.median(ratios[_resampled(ratios.size, seed)], axis=1))


def total_ratio(
    tokens: Sequence[int], seconds: Sequence[float], plain_tokens: Sequence[int], plain_seconds: Sequence[float], seed: int = 0
) -> Interval:
    """All tokens over all seconds, divided by the same of plain `generate`; pairs are resampled together.

    Args:
        tokens: Tokens of each prompt (or batch).
        seconds: Seconds of each.
        plain_tokens: Tokens of plain `generate` for the same prompts, in the same order.
        plain_seconds: Its seconds.
        seed: Of the resampling.

    Raises:
        ValueError: if there is no pair, or if the lengths differ.
    """
    columns = np.stack([_array(tokens), _array(seconds), _array(plain_tokens), _array(plain_seconds)])
    if columns.size == 0:
        raise ValueError("A ratio needs at least one pair of runs.")
    value = float(_total(columns.sum(axis=1)))
    pairs = columns.shape[1]
    if pairs < 2:
        return Interval(value)
    return _percentiles(value, _total(columns[:, _resampled(pairs, seed)].sum(axis=2)))


def ratio_of_sums(parts: Sequence[float], wholes: Sequence[float], seed: int = 0) -> Interval:
    """The sum of some numbers over the sum of others; pairs are resampled together.

    Args:
        parts: Above the line.
        wholes: Below it, in the same order.
        seed: Of the resampling.

    Raises:
        ValueError: if there is no pair, or if the lengths differ.
    """
    columns = np.stack([_array(parts), _array(wholes)])
    if columns.size == 0:
        raise ValueError("A ratio needs at least one pair.")
    above, below = columns.sum(axis=1)
    if columns.shape[1] < 2:
        return Interval(float(above / below))
    above_each, below_each = columns[:, _resampled(columns.shape[1], seed)].sum(axis=2)
    found = _percentiles(float(above / below), above_each / below_each)
    assert found.low is not None and found.high is not None
    # Where all pairs have one ratio, rounding would put it beside its own interval.
    return Interval(found.value, min(found.low, found.value), max(found.high, found.value))


def few_prompts_note(counts: Iterable[int]) -> str:
    """A caution for intervals over few prompts: resampling finds nothing beyond what was measured.

    Args:
        counts: How many prompts each interval is over.

    Returns:
        A sentence; nothing if no interval needs it. A single prompt has no interval.
    """
    if not any(1 < count < FEW for count in counts):
        return ""
    return f"An interval over fewer than {FEW} prompts is a range of these prompts only, and says little of others."


def _total(sums: Numbers) -> Numbers:
    tokens, seconds, plain_tokens, plain_seconds = sums
    ratio: Numbers = (tokens / seconds) / (plain_tokens / plain_seconds)
    return ratio


def _array(values: Sequence[float]) -> Numbers:
    return np.asarray(values, dtype=np.float64)


def _resampled(pairs: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(pairs, size=(RESAMPLES, pairs))


def _percentiles(value: float, resampled: Numbers) -> Interval:
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(value, float(low), float(high))
