"""How much to draft: as long as one more token is worth what it costs.

With survival s_k, the probability that all of the first k drafted tokens are accepted, a chain of k emits E(k) = 1 + s_1 +
... + s_k tokens a round at a cost of T(k) target passes. The best k maximises E / T; adding a token pays while s_k exceeds
its marginal cost times the tokens per pass of the moment. Only earlier rounds are looked at, which keeps every round exact,
and no clock, so that a seeded call repeats itself.
"""

from __future__ import annotations

import torch

from .config import SpeculativeConfig
from .drafters.base import Budget, DraftContext

# Cost of a target pass over n + 1 tokens against one over a single token: 1 + STEP + n * SLOPE. On a CPU small matrix products
# repack their weights, which one-token passes do not; on an accelerator a pass of few tokens is bound by reading the weights.
CPU_STEP, CPU_SLOPE = 0.35, 0.03
ACCELERATOR_STEP, ACCELERATOR_SLOPE = 0.02, 0.005

MEMORY = 0.9  # weight of the past at each round: some ten rounds count
PRIOR = 0.6  # acceptance assumed before anything is seen
PRIOR_ROUNDS = 2.0
PROBE_EVERY = 16  # rounds without a draft before one is tried again


class Pacer:
    """Chooses how much to draft in each round.

    Args:
        config: The call's settings.
        device: Where the target runs.
        step_cost: The drafter's cost of one more level (`Drafter.step_cost`).
    """

    def __init__(self, config: SpeculativeConfig, device: torch.device, step_cost: float):
        self.config = config
        on_cpu = device.type == "cpu"
        self.step = CPU_STEP if on_cpu else ACCELERATOR_STEP
        self.slope = CPU_SLOPE if on_cpu else ACCELERATOR_SLOPE
        self.step_cost = step_cost
        self.reached = [0.0] * config.draft_tokens
        self.accepted = [0.0] * config.draft_tokens
        self.idle = 0

    def budget(self, context: DraftContext) -> Budget:
        """What the next round may draft; never more than a row has room for, its own token included."""
        depth = self._depth() if self.config.adaptive else self.config.draft_tokens
        depths = [max(0, min(depth, context.sequences.remaining(row) - 1)) for row in context.rows]
        nodes = max(depths) if self.config.tree_nodes is None else self.config.tree_nodes
        return Budget(depths, nodes)

    def observe(self, depths: list[int], accepted: list[int]) -> None:
        """Learns from a round.

        Args:
            depths: Per line, the longest path drafted.
            accepted: Per line, the tokens accepted.
        """
        if not any(depths):
            return
        self.reached = [count * MEMORY for count in self.reached]
        self.accepted = [count * MEMORY for count in self.accepted]
        for depth, kept in zip(depths, accepted, strict=True):
            for position in range(min(depth, len(self.reached))):
                if position <= kept:
                    self.reached[position] += 1
                    self.accepted[position] += position < kept

    def _depth(self) -> int:
        best, best_rate, survival, emitted = 0, 1.0, 1.0, 1.0
        for position in range(self.config.draft_tokens):
            survival *= self._acceptance(position)
            emitted += survival
            count = position + 1
            rate = emitted / (1 + self.step + count * (self.slope + self.step_cost))
            if rate > best_rate:
                best, best_rate = count, rate
        if best:
            self.idle = 0
            return best
        self.idle += 1
        return min(2, self.config.draft_tokens) if self.idle % PROBE_EVERY == 0 else 0

    def _acceptance(self, position: int) -> float:
        """The estimated acceptance at a position, leaning on the one before it where little was seen."""
        prior = PRIOR if position == 0 else self._acceptance(position - 1)
        return (self.accepted[position] + prior * PRIOR_ROUNDS) / (self.reached[position] + PRIOR_ROUNDS)
