"""The algorithm: draft, run the target on the draft, verify, keep what holds, until every row has stopped.

Everything that must be exact is elsewhere: `verify` decides what holds, `processors` gives each node the scores plain decoding
would have given it, `sequences` asks the stop rules. Here is only their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from .drafters.base import Accepted, DraftContext, Drafter, check_draft, is_own, with_padded_rows
from .drafters.growth import within_depths
from .outputs import StepOutputs
from .pacing import Pacer
from .processors import RoundLaws
from .rounds import DraftRound, rounds_of
from .sequences import Sequences
from .stats import SpeculationStats
from .target import ModelRunner, Pass
from .tree import DraftTree
from .verify import Verdict, match, settle

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Call:
    """One speculative call of `generate`, ready to run.

    Args:
        target: The model after its pass over the prompt.
        prompt: What that pass gave for the first token.
        drafter: What drafts.
        context: What the drafter is told; its rows are the lines of every tensor here.
        pacer: How much is drafted.
        verification: `"match"`, `"token"`, `"block"`, `"traversal"`, or `"auto"`.
        in_step: Whether rows must keep one length, ended ones too.
        stats: Filled on the way.
        outputs: Collects what is returned of every step.
        show: Called with what every round drafted, by row: a streamer's `put_round`, if it has one.
    """

    target: ModelRunner
    prompt: Pass
    drafter: Drafter
    context: DraftContext
    pacer: Pacer
    verification: str
    in_step: bool
    stats: SpeculationStats
    outputs: StepOutputs
    show: Callable[[Mapping[int, DraftRound]], None] | None = None


def run(call: Call) -> Tensor:
    """Generates. Returns the ids `[B, L]`, prompt included."""
    tree, given = DraftTree.empty(len(call.context.rows), call.context.device), call.prompt
    begin(call)
    while True:
        laws = RoundLaws(given.logits, list(call.context.rows), call.context.processors, call.outputs.scores)
        verdict = verify(call, tree, laws)
        accepted = keep(call, tree, given, laws, verdict)
        learn(call, accepted)
        if not call.context.rows:
            return call.context.sequences.result()
        tree = draft(call)
        given = forward(call, tree)


def timed(part: str) -> Callable[[Function], Function]:
    """Adds the time that a step of the call takes to one part of its statistics."""

    def decorate(step: Function) -> Function:
        @wraps(step)
        def timed_step(call: Call, *arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return step(call, *arguments)
            finally:
                call.stats.seconds[part] += time.perf_counter() - start

        return timed_step  # type: ignore[return-value]

    return decorate


@timed("draft")
def begin(call: Call) -> None:
    """Tells the drafter that the prompt is in."""
    call.drafter.begin(call.context)
    call.pacer.weighs_nodes = call.drafter.weighs_nodes
    call.context.prompt_features = None


@timed("draft")
def draft(call: Call) -> DraftTree:
    """What the drafter proposes within what pays."""
    context = call.context
    context.check_positions()
    budget = call.pacer.budget(context)
    if call.target.must_rest:
        return DraftTree.empty(len(context.rows), context.device)
    tree = call.drafter.propose(context, budget)
    if not is_own(call.drafter):
        check_draft(tree, context)
        tree = within_depths(tree, budget.depths)
    return with_padded_rows(tree, context)


@timed("verify")
def forward(call: Call, tree: DraftTree) -> Pass:
    """The target's pass over each row's last token, the nodes below it, and what the drafter wants to know besides."""
    last = [call.context.sequences.continuations[row][-1] for row in call.context.rows]
    root = torch.tensor(last, device=tree.tokens.device)[:, None]
    nodes = (torch.cat([root, tree.tokens.clamp(min=0)], dim=1), tree.depths, tree.visible)
    if tree.probes is None:
        return call.target.extend(*nodes)
    return call.target.extend(*tree.probes.beside(*nodes)).without_probes(tree.probes.tokens.shape[1])


@timed("verify")
def verify(call: Call, tree: DraftTree, laws: RoundLaws) -> Verdict:
    """Decides what of a draft holds, in the way that the settings and the draft call for."""
    context, rows = call.context, laws.rows
    positions = [context.sequences.generated(row) for row in rows]
    mode = call.verification
    if mode == "auto":
        mode = "block" if tree.has_proposals else "match"
    if mode == "match" or context.noise is None:
        after_level = partial(append_level, context.sequences, rows) if appends_in_verify(call) else None
        return match(tree, laws, context.noise, rows, positions, after_level)
    return settle(tree, laws, context.noise, rows, positions, carry=mode != "token")


def appends_in_verify(call: Call) -> bool:
    """Whether tokens are appended one by one during verification, because a processor may keep a state between them."""
    return call.context.processors.is_sequential


def append_level(sequences: Sequences, rows: Sequence[int], tokens: Sequence[int]) -> bool:
    """Adds one token to each row; says whether any of them goes on."""
    sequences.append(rows, [[token] for token in tokens], in_step=True)
    return not all(sequences.finished[row] for row in rows)


def keep(call: Call, tree: DraftTree, given: Pass, laws: RoundLaws, verdict: Verdict) -> Accepted:
    """Appends what a round emitted, up to where each row stops, and keeps the target's cache in line with it."""
    rows, target = call.context.rows, call.target
    emitted = verdict.emitted
    kept = emitted if appends_in_verify(call) else call.context.sequences.append(rows, emitted, call.in_step)
    paths = [path[: len(tokens)] for path, tokens in zip(verdict.paths, kept, strict=True)]
    features = given.features(getattr(call.drafter, "feature_layers", ()))
    accepted = Accepted(tree, paths, kept, given.logits, features, given.probed, laws.maxima)
    account(call, laws, verdict, accepted)
    collect(call, given, laws, accepted)
    # A row's last token is not kept in the cache: it is the root of the next draft. The prompt's pass wrote for good.
    slots = [[0, *path[: len(tokens) - 1]] for path, tokens in zip(accepted.paths, kept, strict=True)]
    target.commit(slots if target.written else [[] for _ in rows])
    return accepted


def account(call: Call, laws: RoundLaws, verdict: Verdict, accepted: Accepted) -> None:
    """Tells the statistics and the pacing about a round; rows that had ended do not count."""
    sizes, depths = verdict.sizes, verdict.depths
    lines = [line for line in range(len(laws.rows)) if line not in laws.ended]
    passed = call.target.written * len(laws.rows)

    def of(values: Sequence[Any]) -> list[Any]:
        return [values[line] for line in lines]

    call.stats.record_round(of(laws.rows), of(sizes), of(depths), of(accepted.paths), of(accepted.tokens))
    if call.stats.keeps_drafts or call.show is not None:
        drafts = dict(zip(of(laws.rows), rounds_of(accepted, lines), strict=True))
        call.stats.record_drafts(drafts)
        if call.show is not None:
            call.show(drafts)
    # Padding is accepted without being anything that was hoped for.
    drafted = [0 if line in laws.padded else depth for line, depth in enumerate(depths)]
    lengths = [0 if line in laws.padded else len(path) for line, path in enumerate(verdict.paths)]
    seconds = call.stats.seconds["verify"]
    call.pacer.observe(drafted, lengths, accepted.tree.expected, passed, seconds, accepted.tree.steps)


def collect(call: Call, given: Pass, laws: RoundLaws, accepted: Accepted) -> None:
    """Takes what the round gave of the steps that are to be returned."""
    if not call.outputs.are_wanted:
        return
    for line, row in enumerate(laws.rows):
        nodes = [0, *accepted.paths[line]][: len(accepted.tokens[line])]
        scores = laws.scores_at(line, nodes) if call.outputs.scores else None
        call.outputs.record(row, line, nodes, scores, given, call.target)


@timed("draft")
def learn(call: Call, accepted: Accepted) -> None:
    """Shows the drafter what was kept, and takes finished rows out of the batch."""
    rows, finished = call.context.rows, call.context.sequences.finished
    call.drafter.commit(call.context, accepted)
    ended = all(finished[row] for row in rows)
    going = [] if ended else list(range(len(rows))) if call.in_step else compacted([not finished[row] for row in rows])
    if len(going) == len(rows):
        return
    rows[:] = [rows[line] for line in going]
    if rows:
        call.target.keep_rows(going)
        call.drafter.keep_rows(going)


def compacted(going: Sequence[bool]) -> list[int]:
    """The lines that go on, moving as few as possible: those at the end fill the gaps."""
    count = sum(going)
    spare = [line for line in range(len(going) - 1, count - 1, -1) if going[line]]
    return [line if going[line] else spare.pop() for line in range(count)]
