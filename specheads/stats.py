"""What a speculative call did, under the names of vLLM's per-request record, and the output classes that carry it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from .rounds import DraftRound


@dataclass
class RowStats:
    """The counts of one row, or of several pooled.

    A round is one target pass; it emits the accepted draft tokens and one token of the target's own.

    Args:
        num_spec_steps: Rounds, the pass over the prompt included.
        num_draft_tokens: Drafted tokens (nodes, for trees).
        num_accepted_draft_tokens: Drafted tokens that were emitted.
        num_emitted_tokens: Tokens of the continuation.
        acceptance_histogram: How many rounds accepted i draft tokens, i = 0, 1, ...
        drafted_to_position: How many rounds drafted a path of at least i + 1 tokens.
        accepted_to_position: How many rounds accepted at least i + 1 tokens.
        reached_position: How many rounds drafted at least i + 1 tokens and accepted the i before the last of them.
        per_step_drafted: Drafted tokens of every round; `None` unless asked for.
        per_step_accepted: Accepted tokens of every round; `None` unless asked for.
        per_step_drafts: What was drafted in every round, and what of it was accepted; `None` unless asked for.
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_emitted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    drafted_to_position: list[int] = field(default_factory=list)
    accepted_to_position: list[int] = field(default_factory=list)
    reached_position: list[int] = field(default_factory=list)
    per_step_drafted: list[int] | None = None
    per_step_accepted: list[int] | None = None
    per_step_drafts: list[DraftRound] | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per round, the target's own included."""
        return self.num_emitted_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens per drafted token."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_at_position(self) -> list[float]:
        """For each position, the share of the rounds that drafted so far in which it was reached and accepted."""
        return [_share(a, d) for a, d in zip(self.accepted_to_position, self.drafted_to_position, strict=True)]

    @property
    def conditional_acceptance_at_position(self) -> list[float]:
        """For each position, the share accepted of the rounds that drafted so far and accepted all before it."""
        return [_share(a, reached) for a, reached in zip(self.accepted_to_position, self.reached_position, strict=True)]

    def record(self, drafted: int, depth: int, accepted: int, emitted: int) -> None:
        """Adds a round.

        Args:
            drafted: Its nodes.
            depth: Its longest path.
            accepted: Draft tokens emitted.
            emitted: All tokens emitted.
        """
        if emitted == accepted:
            depth = accepted  # the text ended within the draft: what came after was not judged
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        self.num_emitted_tokens += emitted
        _count_up(self.acceptance_histogram, [accepted])
        _count_up(self.drafted_to_position, range(depth))
        _count_up(self.accepted_to_position, range(accepted), size=depth)
        _count_up(self.reached_position, range(min(accepted + 1, depth)), size=depth)
        if self.per_step_drafted is not None and self.per_step_accepted is not None:
            self.per_step_drafted.append(drafted)
            self.per_step_accepted.append(accepted)


@dataclass
class SpeculationStats(RowStats):
    """The pooled counts of a call, with those of every row.

    Args:
        rows: One `RowStats` per row of the batch.
        seconds: Time spent in `"draft"`, in `"verify"` (the target's passes over drafts, and the verifier), and in all
            `"other"` parts, the pass over the prompt among them.
    """

    rows: list[RowStats] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "verify": 0.0, "other": 0.0})

    @classmethod
    def for_batch(cls, batch_size: int, per_step: bool, per_step_drafts: bool = False) -> SpeculationStats:
        """Empty statistics.

        Args:
            batch_size: The number of rows.
            per_step: Whether to keep every round's numbers, per row.
            per_step_drafts: Whether to keep every round's drafts, per row.
        """
        rows = [RowStats(per_step_drafted=[], per_step_accepted=[]) if per_step else RowStats() for _ in range(batch_size)]
        for row in rows:
            row.per_step_drafts = [] if per_step_drafts else None
        return cls(rows=rows)

    def __str__(self) -> str:
        """The pooled counts in a line."""
        accepted = f"{self.num_accepted_draft_tokens} of {self.num_draft_tokens} drafted tokens accepted"
        length = f"mean acceptance length {self.mean_acceptance_length:.2f}"
        return f"{self.num_emitted_tokens} tokens in {self.num_spec_steps} rounds, {length}; {accepted}"

    @property
    def keeps_drafts(self) -> bool:
        """Whether every round's drafts are kept."""
        return any(row.per_step_drafts is not None for row in self.rows)

    def record_drafts(self, drafts: Mapping[int, DraftRound]) -> None:
        """Adds what was drafted in a round, by row."""
        for row, round in drafts.items():
            kept = self.rows[row].per_step_drafts
            if kept is not None:
                kept.append(round)

    def close(self, seconds: float) -> None:
        """Ends the call, which took so long in all."""
        self.seconds["other"] = max(0.0, seconds - self.seconds["draft"] - self.seconds["verify"])

    def record_round(
        self,
        rows: Sequence[int],
        sizes: Sequence[int],
        depths: Sequence[int],
        paths: Sequence[Sequence[int]],
        kept: Sequence[Sequence[int]],
    ) -> None:
        """Adds a round of some rows.

        Args:
            rows: The batch row of each line.
            sizes: The number of nodes drafted for each line.
            depths: The longest path drafted for each line.
            paths: The accepted nodes of each line.
            kept: The tokens that each line got; fewer than were emitted if the row stopped.
        """
        for line, row in enumerate(rows):
            accepted = min(len(paths[line]), len(kept[line]))
            for stats in (self, self.rows[row]):
                stats.record(sizes[line], depths[line], accepted, len(kept[line]))


class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """The usual output of a decoder-only model, with the statistics.

    Attributes:
        speculation: What the call did. It is not among the output's items, which are those of plain `generate`.
    """

    speculation: SpeculationStats


class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The usual output of an encoder-decoder model, with the statistics.

    Attributes:
        speculation: What the call did. It is not among the output's items, which are those of plain `generate`.
    """

    speculation: SpeculationStats


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _count_up(counts: list[int], places: Sequence[int], size: int = 0) -> None:
    counts.extend([0] * (max([size, *(place + 1 for place in places)]) - len(counts)))
    for place in places:
        counts[place] += 1
