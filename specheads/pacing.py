"""How much to draft: as long as one more token is worth what it costs.

With survival s_k, the probability that all of the first k drafted tokens are accepted, a draft of k levels brings s_1 + ... +
s_k tokens more than a round without. A column more in a pass is paid for by every row, so what counts is what the rows gain
together; and it pays while that exceeds the tokens that would have been emitted elsewhere in the time that it takes: its cost,
in plain passes, times the tokens that a plain pass's time brings on average. A batch has ended when its last row has, so a
token counts the more the further its row is behind (`shares`). A drafter that knows how likely each of its nodes
is goes by the same rule node by node.

Estimates can be wrong, so there is a balance besides: a draft may cost no more than earlier drafts have gained, plus a small
allowance (`caution`). Whatever the drafter does, that bounds what it can lose against plain decoding.

Only earlier rounds are looked at, which keeps every round exact. What passes cost is measured on the running machine, unless
that would make the clock decide which random numbers are drawn: a sampled call with a seed repeats itself.

Shapes: B rows still going, N draft nodes of a row; a pass has 1 + N columns of B tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .config import SpeculativeConfig
from .drafters.base import Budget, DraftContext
from .few_rows import filled_columns

PASS_MEMORY = 0.95  # weight of the past at each pass that is measured
DOUBT = 3.0  # how much passes must differ in shape before the difference is put down to it
MEMORY = 0.9  # weight of the past at each round: some ten rounds count
LONG_MEMORY = 0.98  # weight of the past at each draft, in what is remembered when there was none for long
PRIOR = 0.6  # acceptance assumed before anything is seen
PRIOR_ROUNDS = 2.0  # for how many rounds an expectation counts against what was seen
YIELD_MEMORY = 0.95  # weight of the past at each round in the tokens that time brings
YIELD_ROUNDS = 5.0
MARGIN = 1.15  # by how much a draft must promise more than it costs: promises are estimates
LEAST_RATE = 1.02  # what a draft must promise of speed where the rounds are alike
LEAST_SURVIVAL = 0.15  # what room in a pass that others have paid for is used for
ALLOWANCE = 1.0  # plain passes that drafts for a single row may lose before any of them gained
INCOME = 0.01  # plain passes that they may lose in each further round
MOST_SAVED = 4.0  # what gains can add up to: bad drafts after good ones cost no more than that
FIRST_HORIZON = 32
SHARPNESS = 4  # how fast the weight of rows that are ahead falls
TRY_DEPTH = 3
TRY_COST = 0.3  # what a try, a draft that is not expected to pay, may cost
TRY_GAP = 8  # rounds between tries at least


class PassCost:
    """What a target pass costs by the number of its rows and columns.

    What is assumed of the device gives the shape; measured passes give its scale, and corrections to what a token and what a
    second column cost: with f the assumed cost, seconds = scale f + slope tokens + step [columns > 1], by least squares over
    the recent past. Both corrections are held small until passes of different shapes have been seen.

    Args:
        device: Where the target runs. On a CPU small matrix products repack their weights at each call, which a product with a
            single row does not; and stock attention copies what it attends to once there is a mask, which a pass of one column
            mostly does without. On an accelerator a pass of few tokens is bound by reading the weights.
        is_packed: Whether the weights are packed already.
        fills: Whether passes of a few tokens are filled up (`few_rows`).
    """

    def __init__(self, device: torch.device, is_packed: bool, fills: bool = False):
        on_cpu = (0.95, 0.045, 0.05) if is_packed else (1.3, 0.05, 0.05)
        self.fills = fills
        self.base, self.per_token, self.per_masked_row = on_cpu if device.type == "cpu" else (1.02, 0.004, 0.0)
        self.weight = 0.0
        self.products = [[0.0] * 4 for _ in range(3)]  # of the features with one another and with what was measured
        self.mean = 1.0
        self.terms = (1.0, 0.0, 0.0)  # scale, slope, step

    def assumed(self, rows: int, columns: int) -> float:
        """The cost before anything is measured, in passes over one token."""
        columns = filled_columns(rows, columns) if self.fills else columns
        tokens = rows * columns
        masked = self.per_masked_row * rows if columns > 1 else 0.0
        return 1.0 if tokens == 1 else max(1.0, self.base + self.per_token * tokens + masked)

    def observe(self, rows: int, columns: int, seconds: float) -> None:
        """Takes in how long a pass took."""
        if self.weight > 2:  # a pass that something else interrupted is no news about the machine
            seconds = min(seconds, 2 * self(rows, columns))
        cost = self.assumed(rows, columns)
        known = (1.0, rows * columns / cost, float(columns > 1) / cost, seconds / cost)
        self.weight = PASS_MEMORY * self.weight + 1
        self.products = [
            [PASS_MEMORY * total + one * other for total, other in zip(totals, known, strict=True)]
            for totals, one in zip(self.products, known, strict=False)
        ]
        self.mean = self.products[0][3] / self.weight
        self.terms = _terms(self.products)

    def __call__(self, rows: int, columns: int) -> float:
        """The cost of a pass: in seconds once passes were measured, else in passes over one token."""
        columns = filled_columns(rows, columns) if self.fills else columns
        scale, slope, step = self.terms
        cost = scale * self.assumed(rows, columns) + slope * rows * columns + (step if columns > 1 else 0.0)
        return max(cost, 0.1 * self.mean)


def _terms(products: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The least-squares solution, by elimination: a call into a library of linear algebra would take longer than the rest."""
    (a, b, c, x), (_, d, e, y), (_, _, f, z) = products
    d, f = d + DOUBT, f + DOUBT
    down, across = b / a, c / a
    d, e, y = d - down * b, e - down * c, y - down * x
    f, z = f - across * c, z - across * x
    last = e / d
    step = (z - last * y) / (f - last * e)
    slope = (y - e * step) / d
    return (x - b * slope - c * step) / a, slope, step


class Counts:
    """How often each position of a path was judged, and how often accepted; the past fades.

    Args:
        size: The number of positions.
    """

    def __init__(self, size: int):
        self.judged = [0.0] * size
        self.accepted = [0.0] * size

    def fade(self, memory: float) -> None:
        """Weighs down what was counted."""
        self.judged = [count * memory for count in self.judged]
        self.accepted = [count * memory for count in self.accepted]

    def add(self, depth: int, accepted: int) -> None:
        """Counts a path of which so many tokens were accepted: the ones before the first rejected one, and that one."""
        for position in range(min(depth, accepted + 1, len(self.judged))):
            self.judged[position] += 1
            self.accepted[position] += position < accepted

    def leaning(self, position: int, expected: float) -> float:
        """The acceptance at a position, given what was expected of it before."""
        return (self.accepted[position] + PRIOR_ROUNDS * expected) / (self.judged[position] + PRIOR_ROUNDS)


class Records:
    """Counts by row and position, in three memories.

    They lean on one another: a row's own recent rounds on those of all rows, and these on a longer memory. The recent ones fade
    with every round, drafted or not, so that after a time without drafts the first new ones decide.

    Args:
        size: The number of positions.
    """

    def __init__(self, size: int):
        self.size = size
        self.rows: dict[int, Counts] = {}
        self.recent = Counts(size)
        self.lasting = Counts(size)

    def of_round(self, rows: Sequence[int], is_drafted: bool) -> list[tuple[Counts, Counts, Counts]]:
        """The counts that each row's share of a round goes into, faded: its own, those of all rows, and the lasting ones."""
        self.recent.fade(MEMORY)
        if is_drafted:
            self.lasting.fade(LONG_MEMORY)
        owned = [self.rows.setdefault(row, Counts(self.size)) for row in rows]
        for own in owned:
            own.fade(MEMORY)
        return [(own, self.recent, self.lasting) for own in owned]


class Acceptance(Records):
    """What is expected to be accepted, for each row and position."""

    def observe(self, rows: Sequence[int], depths: Sequence[int], accepted: Sequence[int]) -> None:
        """Learns from a round.

        Args:
            rows: The batch row of each line.
            depths: Per line, up to where it counts.
            accepted: Per line, the tokens accepted.
        """
        for memories, depth, kept in zip(self.of_round(rows, any(depths)), depths, accepted, strict=True):
            for counts in memories:
                counts.add(depth, kept)

    def survival(self, row: int) -> list[float]:
        """The probability `[K]` that a row's tokens up to each position are accepted."""
        own, survivals = self.rows.get(row), []
        survival, lasting, recent = 1.0, PRIOR, None
        for position in range(self.size):
            lasting = self.lasting.leaning(position, lasting)
            # Where little was seen, a position is like it was, and like the one before it is now.
            expected = lasting if recent is None else (lasting + recent) / 2
            recent = self.recent.leaning(position, expected)
            survival *= recent if own is None else own.leaning(position, recent)
            survivals.append(survival)
        return survivals


def shares(context: DraftContext) -> list[float]:
    """What a token of each line counts for: the lines that may end last count, and equally while none is ahead.

    A pass costs little less when a row has left, so a row that is ahead saves little by getting further. How long the text of
    the slowest row will become is not known: at least as long again as it is, if its room allows.
    """
    if len(context.rows) == 1:
        return [1.0]
    generated = [context.sequences.generated(row) for row in context.rows]
    slowest = min(range(len(generated)), key=generated.__getitem__)
    horizon = max(1, min(context.sequences.remaining(context.rows[slowest]), FIRST_HORIZON + generated[slowest]))
    behind = [max(0.0, 1 - (count - generated[slowest]) / horizon) ** SHARPNESS for count in generated]
    return [weight / sum(behind) for weight in behind]


def caution(rows: int) -> float:
    """By how much less drafts for so many rows may lose than those for one: seldom do all of them gain from a draft."""
    return float(rows**-0.5)


class Pacer:
    """Chooses how much to draft in each round.

    Args:
        config: The call's settings.
        cost: What the target's passes cost.
        step_cost: The drafter's cost of one more level (`Drafter.step_cost`).
        weighs_nodes: Whether the drafter leaves out what does not pay (`Drafter.weighs_nodes`).
        uses_clock: Whether costs are measured.
        most: The most tokens along a path that any row has room for.
        rows: How many rows there are.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        cost: PassCost,
        step_cost: float,
        weighs_nodes: bool,
        uses_clock: bool,
        most: int,
        rows: int,
    ):
        self.config = config
        self.cost = cost
        self.step_cost = step_cost
        self.weighs_nodes = weighs_nodes
        self.uses_clock = uses_clock
        self.most = max(0, most)
        self.acceptance = Acceptance(self.most)
        self.rows: list[int] = []
        self.generated: list[int] = []
        self.shares: list[float] = []
        self.depths: list[int] = []
        self.balance = ALLOWANCE * caution(rows)
        self.idle = 0
        self.emitted = self.spent = YIELD_ROUNDS
        self.hoped = self.kept = 0.0
        self.ever_hoped = self.ever_kept = 0.0
        self.verify_seconds = 0.0

    def budget(self, context: DraftContext) -> Budget:
        """What the next round may draft; never more than a row has room for, its own token included."""
        self.rows, self.shares, lines = list(context.rows), shares(context), len(context.rows)
        self.generated = [context.sequences.generated(row) for row in self.rows]
        rooms = [max(0, min(self.most, context.room(line))) for line in range(lines)]
        if not self.config.adaptive:
            self.depths = rooms
        elif self.weighs_nodes:
            self.depths = [min(self._affordable(lines, max(rooms)), room) for room in rooms]
        else:
            self.depths = self._depths(rooms)
        budget = Budget(list(self.depths), self._nodes(max(self.depths)))
        if self.config.adaptive and budget.nodes:
            self._price(budget, lines)
        return budget

    def observe(
        self,
        depths: list[int],
        accepted: list[int],
        expected: float | None,
        tokens: int,
        verify_seconds: float,
        steps: int | None = None,
    ) -> None:
        """Learns from a round.

        Args:
            depths: Per line, the longest path drafted.
            accepted: Per line, the tokens accepted.
            expected: How many the drafter thought would be accepted, over all lines; `None` if it does not know.
            tokens: The tokens of the target's pass, 0 for the pass over the prompt.
            verify_seconds: All time spent on passes and verification so far.
            steps: How many levels the drafter took a step for; `None` for those of the longest path.
        """
        lines, duration = len(depths), verify_seconds - self.verify_seconds
        self.verify_seconds = verify_seconds
        if tokens:
            columns = tokens // lines
            if self.uses_clock:
                self.cost.observe(lines, columns, duration)
            self._settle(lines, columns, max(depths) if steps is None else steps, accepted)
        self._trust(expected, sum(accepted))
        if len(self.rows) != lines:  # nothing was asked for: the prompt's pass
            return
        # A line that was asked for a draft and had none counts as one that failed: others made the pass wide, and will again.
        widest = max(depths)
        counted = [max(depth, min(asked, widest)) for depth, asked in zip(depths, self.depths, strict=True)]
        self.acceptance.observe(self.rows, counted, accepted)

    def _settle(self, lines: int, columns: int, steps: int, accepted: list[int]) -> None:
        """Books what a round cost and brought, in plain passes."""
        extra = self._relative(lines, columns - 1) - 1 + steps * self.step_cost
        brought = self._advance(accepted)
        self.balance = min(MOST_SAVED, self.balance + INCOME * caution(lines) + brought - extra)
        self.emitted = YIELD_MEMORY * self.emitted + 1 + brought
        self.spent = YIELD_MEMORY * self.spent + 1 + extra

    def _advance(self, accepted: list[int]) -> int:
        """How much further than a plain step a round brought the row that is behind: with it the batch ends."""
        before = self.generated if len(self.generated) == len(accepted) else [0] * len(accepted)
        return min(count + kept for count, kept in zip(before, accepted, strict=True)) - min(before)

    def _trust(self, expected: float | None, accepted: int) -> None:
        """Compares what the drafter hoped for with what came of it; fades without drafts too, so that it is tried again."""
        hoped, kept = (0.0, 0) if expected is None else (expected, accepted)
        self.hoped, self.kept = MEMORY * self.hoped + hoped, MEMORY * self.kept + kept
        self.ever_hoped, self.ever_kept = LONG_MEMORY * self.ever_hoped + hoped, LONG_MEMORY * self.ever_kept + kept

    def _price(self, budget: Budget, lines: int) -> None:
        """Tells the drafter what its nodes cost, in accepted tokens as it counts them."""
        most, half = budget.nodes, budget.nodes // 2
        full = self._relative(lines, most)
        lasting = (self.ever_kept + PRIOR_ROUNDS) / (self.ever_hoped + PRIOR_ROUNDS)
        trust = (self.kept + PRIOR_ROUNDS * lasting) / (self.hoped + PRIOR_ROUNDS)
        worth = budget.pass_worth = MARGIN * self._yield() / trust
        node_cost = max(0.0, (full - self._relative(lines, half)) / (most - half)) if half else 0.0
        budget.entry_cost = worth * max(0.0, full - 1 - most * node_cost)
        budget.node_cost = worth * node_cost
        budget.balance, budget.pass_cost = self.balance, partial(self._relative, lines)

    def _yield(self) -> float:
        """The tokens a row gets in the time of a plain pass, at least the one that plain decoding gives."""
        return max(1.0, self.emitted / self.spent)

    def _relative(self, lines: int, nodes: int) -> float:
        """The cost of a pass with N nodes per row against one without."""
        return max(1.0, self.cost(lines, 1 + nodes) / self.cost(lines, 1)) if nodes else 1.0

    def _extra(self, lines: int, depth: int) -> float:
        """What a draft of some depth costs, in plain passes."""
        return self._relative(lines, self._nodes(depth)) - 1 + depth * self.step_cost

    def _nodes(self, depth: int) -> int:
        """The nodes of a draft of some depth: the full number at full depth."""
        if self.config.tree_nodes is None or depth == 0:
            return depth
        return max(depth, -(-self.config.tree_nodes * depth // self.config.draft_tokens))

    def _affordable(self, lines: int, most: int, limit: float = float("inf")) -> int:
        """The greatest depth whose cost, if all of it were lost, the balance covers."""
        return max((depth for depth in range(most + 1) if self._extra(lines, depth) <= min(limit, self.balance)), default=0)

    def _depths(self, rooms: list[int]) -> list[int]:
        """Per line, the depth that pays for the batch, as far as the line's own tokens have a chance."""
        survivals = [self.acceptance.survival(row)[:room] for row, room in zip(self.rows, rooms, strict=True)]
        lines = len(rooms)
        affordable = self._affordable(lines, max(rooms))
        # These drafters' rounds are all alike, so the best rate of a round is the best one on the whole.
        best, best_rate, brought = 0, LEAST_RATE, 0.0
        for position in range(affordable):
            brought += sum(
                share * survival[position]
                for share, survival in zip(self.shares, survivals, strict=True)
                if position < len(survival)
            )
            rate = (1 + brought) / (1 + self._extra(lines, position + 1))
            if rate > best_rate:
                best, best_rate = position + 1, rate
        self.idle = 0 if best else self.idle + 1
        if not best:
            return [min(self._try(lines, max(rooms)), room) for room in rooms]
        return [sum(chance >= LEAST_SURVIVAL for chance in survival[:best]) for survival in survivals]

    def _try(self, lines: int, most: int) -> int:
        """How much is drafted though it is not expected to pay: now and then a little, as often as it may be lost."""
        depth = self._affordable(lines, min(TRY_DEPTH, most), TRY_COST) or self._affordable(lines, min(1, most))
        if not depth or self.idle < max(TRY_GAP, self._extra(lines, depth) / (INCOME * caution(lines))):
            return 0
        self.idle = 0
        return depth
