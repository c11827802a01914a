"""Where rounds of drafting start: training on those places is what drafting itself would replay.

In a text that the target wrote, a round that starts at a token goes on to the token after the first rejection. How likely it
accepts how much of the text is known from the laws, so how likely a round starts at each place is known without a roll-out: a
place is seldom a start when drafts reach beyond it, and often when they break off before it. Weighting roots by this is
on-policy training without its noise (compare arXiv 2605.29343, Draft-OPD, which replays drafts from rejected positions).

Shapes: R roots, K depths.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from .batch import Roots


class RoundStarts:
    """How likely a round starts at each root of some rows; roots are asked for in order, in pieces or all together.

    Args:
        columns: T, the length of the rows.

    Attributes:
        begun: For each root that was asked for last, whether a reply begins with it; `None` if it is none of a reply's.
    """

    def __init__(self, columns: int):
        self.columns = columns
        self.begun: list[bool | None] = []
        self._chances: dict[int, float] = defaultdict(float)
        self._last = -2

    def at(self, roots: Roots, reached: Tensor) -> Tensor:
        """The chances `[R]` of roots that come after those asked for before.

        Args:
            roots: The roots.
            reached: `[R, K]` for each depth, how likely a draft is accepted up to there, given the text.
        """
        places, depths, deployed = roots.flat(self.columns).tolist(), roots.depths.tolist(), roots.deployed.tolist()
        self.begun, chances = [], []
        for place, depth, is_deployed, reach in zip(places, depths, deployed, reached.tolist(), strict=True):
            chance = self._chances.pop(place, 0.0)
            begins = is_deployed and self._last != place - 1
            if begins:
                chance = 1.0  # the target's first token comes without a draft
            elif not is_deployed:
                chance = 0.0
            self._last = place if is_deployed else -2
            self.begun.append(begins if is_deployed else None)
            chances.append(chance)
            accepted = [1.0, *reach[:depth], 0.0]
            for count in range(depth + 1):
                self._chances[place + count + 1] += chance * (accepted[count] - accepted[count + 1])
        return torch.tensor(chances, dtype=reached.dtype)
