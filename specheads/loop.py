"""The algorithm: draft, run the target on the draft, verify, keep what holds, until every row has stopped.

Everything that must be exact is elsewhere: `verify` decides what holds, `processors` gives each node the scores plain decoding
would have given it, `sequences` asks the stop rules. Here is only their order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .drafters.base import Accepted, DraftContext, Drafter
from .pacing import Pacer
from .processors import RoundLaws
from .stats import SpeculationStats
from .target import ModelRunner
from .tree import DraftTree
from .verify import Verdict, match, settle


@dataclass
class Call:
    """One speculative call of `generate`, ready to run.

    Args:
        target: The model after its pass over the prompt.
        logits: `[B, 1, V]` what that pass gave for the first token.
        drafter: What drafts.
        context: What the drafter is told; its rows are the lines of every tensor here.
        pacer: How much is drafted.
        verification: `"match"`, `"token"`, `"block"`, `"traversal"`, or `"auto"`.
        in_step: Whether unfinished rows must keep one length.
        stats: Filled on the way.
    """

    target: ModelRunner
    logits: Tensor
    drafter: Drafter
    context: DraftContext
    pacer: Pacer
    verification: str
    in_step: bool
    stats: SpeculationStats


def run(call: Call) -> Tensor:
    """Generates. Returns the ids `[B, L]`, prompt included."""
    target, drafter, context, sequences = call.target, call.drafter, call.context, call.context.sequences
    logits, tree = call.logits, DraftTree.empty(len(context.rows), context.device)
    with timed(call.stats, "draft"):
        drafter.begin(context)
    while True:
        with timed(call.stats, "verify"):
            verdict = verify(call, tree, logits)
        kept = verdict.emitted if steps_in_verify(call) else sequences.append(context.rows, verdict.emitted, call.in_step)
        paths = [path[: len(tokens)] for path, tokens in zip(verdict.paths, kept, strict=True)]
        sizes, depths = tree.shape_per_line()
        call.stats.record_round(context.rows, sizes, depths, paths, kept)
        call.pacer.observe(
            depths,
            [len(path) for path in verdict.paths],
            tree.expected,
            tokens=target.written * len(context.rows),
            verify_seconds=call.stats.seconds["verify"],
        )
        # The last token of a row is not in the target's cache: it is the root of the next draft.
        target.commit(
            [[0, *path[: len(tokens) - 1]] if target.written else [] for path, tokens in zip(paths, kept, strict=True)]
        )
        with timed(call.stats, "draft"):
            drafter.commit(context, Accepted(tree, paths, kept, logits))
            drop_finished(call)
            if not context.rows:
                return sequences.result()
            tree = drafter.propose(context, call.pacer.budget(context))
        with timed(call.stats, "verify"):
            logits = forward(call, tree)


def forward(call: Call, tree: DraftTree) -> Tensor:
    """The target's logits `[B, N + 1, V]` at each row's last token and at the nodes below it."""
    last = [call.context.sequences.continuations[row][-1] for row in call.context.rows]
    root = torch.tensor(last, device=tree.tokens.device)[:, None]
    return call.target.extend(torch.cat([root, tree.tokens.clamp(min=0)], dim=1), tree.depths, tree.visible)


def verify(call: Call, tree: DraftTree, logits: Tensor) -> Verdict:
    """Decides what of a draft holds, in the way that the settings and the draft call for."""
    context, rows = call.context, list(call.context.rows)
    laws = RoundLaws(logits, rows, context.processors)
    positions = [context.sequences.generated(row) for row in rows]
    mode = call.verification
    if mode == "auto":
        mode = "match" if not tree.has_proposals else "block"
    if mode == "match" or context.noise is None:

        def after_level(tokens: list[int]) -> bool:
            context.sequences.append(rows, [[token] for token in tokens], in_step=True)
            return not any(context.sequences.finished[row] for row in rows)

        return match(tree, laws, context.noise, rows, positions, after_level if steps_in_verify(call) else None)
    return settle(tree, laws, context.noise, rows, positions, carry=mode != "token")


def steps_in_verify(call: Call) -> bool:
    """Whether tokens are appended one by one during verification, because a processor may keep a state between them."""
    return call.context.processors.is_sequential


def drop_finished(call: Call) -> None:
    """Takes finished rows out of the batch; the rows at its end take their places."""
    rows, finished = call.context.rows, call.context.sequences.finished
    kept = compacted([not finished[row] for row in rows])
    if len(kept) < len(rows):
        rows[:] = [rows[line] for line in kept]
        if kept:
            call.target.keep_rows(kept)
            call.drafter.keep_rows(kept)


def compacted(going: Sequence[bool]) -> list[int]:
    """The lines that go on, moving as few as possible: those at the end fill the gaps."""
    count = sum(going)
    spare = [line for line in range(len(going) - 1, count - 1, -1) if going[line]]
    return [line if going[line] else spare.pop() for line in range(count)]


@contextmanager
def timed(stats: SpeculationStats, part: str) -> Iterator[None]:
    """Adds the time of a block to one part of the statistics."""
    start = time.perf_counter()
    yield
    stats.seconds[part] += time.perf_counter() - start
