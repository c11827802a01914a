"""Walks every branch of a random procedure and adds up the exact law of what it returns.

All chance in the library passes through one `Noise`. `ReplayNoise` answers its draws from a script and notes what else it could
have answered; `law_of` runs the procedure once per branch, with the branch's probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor


class ReplayNoise:
    """Follows a script of choices, then takes the first possible one. Rows not watched draw from streams of their own.

    With `first`, the first draw that could come out in several ways comes out so.
    """

    def __init__(self, script: Sequence[int] = (), watched: int | None = None, seed: int = 0, first: int | None = None):
        self.script = list(script)
        self.first = first
        self.watched = watched
        self.seed = seed
        self.choices: list[int] = []
        self.options: list[list[int]] = []
        self.probability = 1.0
        self.streams: dict[int, torch.Generator] = {}

    def draw(self, weights: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        assert len(rows) == weights.shape[0]
        assert bool((weights >= 0).all()) and bool((weights.sum(-1) > 0).all()), weights
        return torch.tensor(
            [self._one(line.double(), row) for line, row in zip(weights, rows, strict=True)], device=weights.device
        )

    def _one(self, weights: Tensor, row: int) -> int:
        law = weights / weights.sum()
        if self.watched is not None and row != self.watched:
            stream = self.streams.setdefault(row, torch.Generator().manual_seed(self.seed * 1000 + row))
            uniform = torch.rand((), generator=stream, dtype=torch.double)
            return min(int((law.cumsum(0) <= uniform).sum()), int(law.nonzero().max()))
        options = law.nonzero().flatten().tolist()
        if self.first is not None and len(options) > 1:
            assert self.first in options
            options, self.first = [self.first], None
        step = len(self.choices)
        choice = self.script[step] if step < len(self.script) else options[0]
        self.choices.append(choice)
        self.options.append(options)
        self.probability *= float(law[choice])
        return choice


def branches(
    run: Callable[[ReplayNoise], object], watched: int | None = None, seed: int = 0, first: int | None = None
) -> Iterator[tuple[float, object]]:
    """The probability and the result of every branch of `run`; with `first`, of those whose first real choice it is."""
    script: list[int] | None = []
    while script is not None:
        noise = ReplayNoise(script, watched, seed, first)
        result = run(noise)
        yield noise.probability, result
        script = _next_script(noise)


def _next_script(noise: ReplayNoise) -> list[int] | None:
    for step in reversed(range(len(noise.choices))):
        later = [option for option in noise.options[step] if option > noise.choices[step]]
        if later:
            return [*noise.choices[:step], later[0]]
    return None


def law_of(
    run: Callable[[ReplayNoise], Hashable], watched: int | None = None, seed: int = 0
) -> tuple[dict[Hashable, float], int]:
    """The exact law of what `run` returns, and the number of branches."""
    law: dict[Hashable, float] = defaultdict(float)
    count = 0
    for probability, result in branches(run, watched, seed):
        law[result] += probability
        count += 1
    return dict(law), count


def total_variation(left: dict[Hashable, float], right: dict[Hashable, float]) -> float:
    """Half the sum of the differences of two laws."""
    return 0.5 * sum(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys())
