"""How much to draft: as long as one more token is worth what it costs.

With survival s_k, the probability that all of the first k drafted tokens are accepted, a draft of k levels emits E(k) = 1 +
s_1 + ... + s_k tokens a round, at a cost of T(k) passes over a single token. The best k maximises E / T. A drafter that knows
how likely each of its nodes is goes by the same rule node by node: a node pays while its probability exceeds its marginal
cost times the tokens per pass of the moment.

Only earlier rounds are looked at, which keeps every round exact. What passes cost is measured on the running machine, unless
that would make the clock decide which random numbers are drawn: a sampled call with a seed repeats itself.

Shapes: B rows still going, N draft nodes of a row.
"""

from __future__ import annotations

import torch

from .config import SpeculativeConfig
from .drafters.base import Budget, DraftContext

PASS_MEMORY = 0.95  # weight of the past at each pass that is measured
DOUBT = 3.0  # how much passes must differ in size before their slope is believed
MEMORY = 0.9  # weight of the past at each round: some ten rounds count
PRIOR = 0.6  # acceptance assumed before anything is seen
PRIOR_ROUNDS = 2.0
MARGIN = 1.15  # by how much a draft must promise more than it costs: promises are estimates
PROBE_EVERY = 16  # rounds without a draft before one is tried again
PROBE_DEPTH = 3


class PassCost:
    """What a target pass costs by the number of its tokens.

    What is assumed of the device gives the shape, and measured passes its scale and a slope of their own: with f the assumed
    cost, seconds(n) = scale f(n) + slope n, by least squares over the recent past.

    Args:
        device: Where the target runs. On a CPU small matrix products repack their weights at each call, which a product with a
            single row does not; on an accelerator a pass of few tokens is bound by reading the weights.
        is_packed: Whether the weights are packed already.
    """

    def __init__(self, device: torch.device, is_packed: bool):
        on_cpu = (0.7, 0.08) if is_packed else (1.2, 0.07)
        self.base, self.per_token = on_cpu if device.type == "cpu" else (1.02, 0.004)
        self.scale, self.slope = 1.0, 0.0
        # Weighted sums over passes of x = n / f(n), y = seconds / f(n), and of their products.
        self.weight = self.x = self.y = self.xx = self.xy = 0.0

    def assumed(self, tokens: int) -> float:
        """The cost before anything is measured, in passes over one token."""
        return 1.0 if tokens == 1 else max(1.0, self.base + self.per_token * tokens)

    def observe(self, tokens: int, seconds: float) -> None:
        """Takes in how long a pass took."""
        if self.weight > 2:  # a pass that something else interrupted is no news about the machine
            seconds = min(seconds, 2 * self(tokens))
        x, y = tokens / self.assumed(tokens), seconds / self.assumed(tokens)
        fresh = (1.0, x, y, x * x, x * y)
        past = (self.weight, self.x, self.y, self.xx, self.xy)
        self.weight, self.x, self.y, self.xx, self.xy = (PASS_MEMORY * old + new for old, new in zip(past, fresh, strict=True))
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx - self.weight * mean_x**2
        self.slope = (self.xy - self.weight * mean_x * mean_y) / (spread + DOUBT)
        self.scale = mean_y - self.slope * mean_x

    def __call__(self, tokens: int) -> float:
        """The cost of a pass over some tokens: in seconds once passes were measured, else in passes over one token."""
        return max(
            self.scale * self.assumed(tokens) + self.slope * tokens, 0.1 * (self.y / self.weight if self.weight else 1.0)
        )


class Pacer:
    """Chooses how much to draft in each round.

    Args:
        config: The call's settings.
        cost: What the target's passes cost.
        step_cost: The drafter's cost of one more level (`Drafter.step_cost`).
        weighs_nodes: Whether the drafter leaves out what does not pay (`Drafter.weighs_nodes`).
        uses_clock: Whether costs are measured.
        most: The most tokens along a path that any row has room for.
    """

    def __init__(
        self, config: SpeculativeConfig, cost: PassCost, step_cost: float, weighs_nodes: bool, uses_clock: bool, most: int
    ):
        self.config = config
        self.cost = cost
        self.step_cost = step_cost
        self.weighs_nodes = weighs_nodes
        self.uses_clock = uses_clock
        self.reached = [0.0] * most
        self.accepted = [0.0] * most
        self.idle = 0
        self.hoped = self.kept = 0.0
        self.verify_seconds = 0.0

    def budget(self, context: DraftContext) -> Budget:
        """What the next round may draft; never more than a row has room for, its own token included."""
        adaptive, lines = self.config.adaptive, len(context.rows)
        depth = self._depth(lines) if adaptive and not self.weighs_nodes else len(self.reached)
        depths = [max(0, min(depth, context.room(line))) for line in range(lines)]
        budget = Budget(depths, self._nodes(max(depths)))
        if adaptive and budget.nodes:
            self._price(budget, lines)
        return budget

    def observe(
        self, depths: list[int], accepted: list[int], expected: float | None, tokens: int, verify_seconds: float
    ) -> None:
        """Learns from a round.

        Args:
            depths: Per line, the longest path drafted.
            accepted: Per line, the tokens accepted.
            expected: How many the drafter thought would be accepted, over all lines; `None` if it does not know.
            tokens: The tokens of the target's pass, 0 for the pass over the prompt.
            verify_seconds: All time spent on passes and verification so far.
        """
        if tokens and self.uses_clock:
            self.cost.observe(tokens, verify_seconds - self.verify_seconds)
        self.verify_seconds = verify_seconds
        # Fades without drafts too: a drafter that was wrong is tried again.
        self.hoped = self.hoped * MEMORY + (expected or 0.0)
        self.kept = self.kept * MEMORY + (sum(accepted) if expected is not None else 0.0)
        if not any(depths):
            return
        self.reached = [count * MEMORY for count in self.reached]
        self.accepted = [count * MEMORY for count in self.accepted]
        for depth, kept in zip(depths, accepted, strict=True):
            for position in range(min(depth, kept + 1, len(self.reached))):
                self.reached[position] += 1
                self.accepted[position] += position < kept

    def _price(self, budget: Budget, lines: int) -> None:
        """Tells the drafter what its nodes cost, in accepted tokens as it counts them."""
        most, half = budget.nodes, budget.nodes // 2
        full = self._relative(lines, most)
        trust = (self.kept + PRIOR_ROUNDS) / (self.hoped + PRIOR_ROUNDS)
        node_cost = max(0.0, (full - self._relative(lines, half)) / (most - half)) if half else 0.0
        budget.entry_cost = MARGIN * max(0.0, full - 1 - most * node_cost) / trust
        budget.node_cost = MARGIN * node_cost / trust

    def _relative(self, lines: int, nodes: int) -> float:
        """The cost of a pass with N nodes per row against one without."""
        return self.cost(lines * (1 + nodes)) / self.cost(lines)

    def _nodes(self, depth: int) -> int:
        """The nodes of a draft of some depth: the full number at full depth."""
        if self.config.tree_nodes is None or depth == 0:
            return depth
        return max(depth, -(-self.config.tree_nodes * depth // self.config.draft_tokens))

    def _depth(self, lines: int) -> int:
        best, best_rate, survival, emitted = 0, 1.0, 1.0, 1.0
        for position, acceptance in enumerate(self._acceptances()):
            survival *= acceptance
            emitted += survival
            depth = position + 1
            rate = emitted / (self._relative(lines, self._nodes(depth)) + depth * self.step_cost)
            if rate > best_rate:
                best, best_rate = depth, rate
        self.idle = 0 if best else self.idle + 1
        if self.idle and self.idle % PROBE_EVERY == 0:
            return min(PROBE_DEPTH, len(self.reached))
        return best

    def _acceptances(self) -> list[float]:
        """The acceptance expected at each position, leaning on the one before it where little was seen."""
        expected, prior = [], PRIOR
        for accepted, reached in zip(self.accepted, self.reached, strict=True):
            prior = (accepted + prior * PRIOR_ROUNDS) / (reached + PRIOR_ROUNDS)
            expected.append(prior)
        return expected
