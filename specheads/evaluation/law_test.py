"""Whether counts follow a law: a G-test, and what it would see.

If the true law is another one, the statistic follows a chi-square law with the noncentrality 2 N KL, N samples; by Pinsker's
inequality that is at least 4 N d², d the total variation between the two laws of the cells.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Cell = TypeVar("Cell", bound=Hashable)

LEAST_EXPECTED = 5.0  # below that, the chi-square law does not hold for a cell's count


@dataclass(frozen=True)
class GTest:
    """The outcome of a test.

    Args:
        statistic: G.
        cells: How many cells there were, after pooling.
        p_value: How probable so large a G is if the counts follow the law, but for the rounding that is allowed for.
    """

    statistic: float
    cells: int
    p_value: float


def g_test(counts: Mapping[Cell, int], law: Mapping[Cell, float], rounding: float = 0.0) -> GTest:
    """Tests counts against a law.

    Args:
        counts: By cell.
        law: The probability of each cell.
        rounding: The noncentrality that rounding alone may give the statistic.
    """
    samples = sum(counts.values())
    groups = pooled_cells(law, samples)
    total = sum(law.values())
    statistic = 0.0
    for group in groups:
        seen, share = sum(counts.get(cell, 0) for cell in group), sum(law[cell] for cell in group) / total
        if seen:
            statistic += 2 * seen * math.log(seen / (samples * share))
    statistic = max(0.0, statistic)
    p_value = _survival(statistic, len(groups) - 1, rounding) if len(groups) > 1 else 1.0
    return GTest(statistic, len(groups), p_value)


def pooled_cells(law: Mapping[Cell, float], samples: int) -> list[list[Cell]]:
    """The cells, those too sparse to stand alone as one; with the least probable other one if they are too few even so."""
    by_probability = sorted(law, key=lambda cell: -law[cell])
    groups = [[cell] for cell in by_probability if samples * law[cell] >= LEAST_EXPECTED]
    sparse = by_probability[len(groups) :]
    if not sparse:
        return groups
    if groups and samples * sum(law[cell] for cell in sparse) < LEAST_EXPECTED:
        groups[-1] += sparse
        return groups
    return [*groups, sparse]


def seen_distance(cells: int, samples: int, level: float, power: float, rounding: float = 0.0) -> float:
    """The total variation from which on a test at a level sees a change with a probability.

    Args:
        cells: Of the test, after pooling.
        samples: N.
        level: The probability of a false alarm.
        power: The probability of seeing it.
        rounding: As for `g_test`.

    Returns:
        At most 1, which means that nothing is sure to be seen.
    """
    from scipy.optimize import brentq
    from scipy.stats import ncx2

    if cells < 2:
        return 1.0
    freedom = cells - 1
    limit = ncx2.isf(level, freedom, rounding)
    highest = 4.0 * samples
    if ncx2.sf(limit, freedom, highest) < power:
        return 1.0
    needed = brentq(lambda noncentrality: ncx2.sf(limit, freedom, noncentrality) - power, rounding, highest)
    return min(1.0, math.sqrt(needed / highest))


def _survival(statistic: float, freedom: int, noncentrality: float) -> float:
    from scipy.stats import ncx2

    return float(ncx2.sf(statistic, freedom, noncentrality))
