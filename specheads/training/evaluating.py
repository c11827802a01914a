"""Evaluation of a head: what drafts would be worth, worked out from the target's texts, and what `generate` makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object

from ..drafters import load_drafter
from ..evaluation.intervals import Interval, ratio_of_sums
from ..mixin import disable, enable
from ..stats import RowStats
from .batch import TrainingBatch
from .metrics import Deployment, Evaluation
from .progress import by_position
from .step import DraftTraining

DEPLOYED = "deployed"
TOP_K = 5


@dataclass
class Measured:
    """What an evaluation found, over all processes.

    Args:
        evaluation: What was worked out.
        examples: From how many texts.
        generated: What `generate` did, one entry per prompt.
        depth: K.
    """

    evaluation: Evaluation
    examples: int
    generated: list[RowStats] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """All of it under names for trackers: positions count from 1."""
        sums, evaluation = self.evaluation.sums[DEPLOYED], self.evaluation
        figures = {
            "mean_acceptance_length": sums.mean_acceptance_length,
            "expected_length": sums.expected_length,
            **by_position("acceptance", sums.acceptance),
            **by_position("conditional_acceptance", sums.conditional_acceptance),
            **by_position("acceptance_at_position", sums.acceptance_at_position),
            **by_position("conditional_acceptance_at_position", sums.conditional_acceptance_at_position),
            **by_position("top1_agreement", evaluation.top_k_agreement(1)),
            **by_position(f"top{TOP_K}_agreement", evaluation.top_k_agreement(TOP_K)),
        }
        return figures | self._generated_figures()

    def generated_length(self, seed: int = 0) -> Interval:
        """The mean acceptance length of what `generate` did, and its 95 % interval by resampling prompts."""
        tokens, rounds = zip(*((row.num_emitted_tokens, row.num_spec_steps) for row in self.generated), strict=True)
        return ratio_of_sums(tokens, rounds, seed)

    def generated_acceptance(self) -> list[float]:
        """For each position, the share of the rounds that drafted so far in which it was accepted."""
        shares = []
        for place in range(self.evaluation.depth):
            accepted = sum(_at(row.accepted_to_position, place) for row in self.generated)
            drafted = sum(_at(row.drafted_to_position, place) for row in self.generated)
            shares.append(accepted / drafted if drafted else 0.0)
        return shares

    def _generated_figures(self) -> dict[str, float]:
        if not self.generated:
            return {}
        by_place = by_position("generate_acceptance_at_position", self.generated_acceptance())
        return {"generate_mean_acceptance_length": self.generated_length().value, **by_place}


def measure(
    drafts: DraftTraining,
    batches: Iterable[TrainingBatch],
    prompts: Sequence[Sequence[int]],
    deployment: Deployment,
    tokens: int,
    seed: int,
) -> Measured:
    """Evaluates a head; a call for all processes, each with its own share.

    Args:
        drafts: The head in training.
        batches: Texts that the target wrote.
        prompts: Prompts for `generate`.
        deployment: How drafts are made and verified.
        tokens: The most tokens of an answer.
        seed: Of the answers.
    """
    evaluation, examples = Evaluation(drafts.settings.depth, {DEPLOYED: deployment}), 0
    for batch in batches:
        drafts.evaluate(batch, evaluation)
        examples += len(batch.input_ids)
    generated = _generate(drafts, prompts, deployment, tokens, seed) if prompts else []
    parts = gather_object([(evaluation, examples, generated)])
    return Measured(
        merged([part[0] for part in parts]), sum(part[1] for part in parts), [row for part in parts for row in part[2]]
    )


def _generate(
    drafts: DraftTraining, prompts: Sequence[Sequence[int]], deployment: Deployment, tokens: int, seed: int
) -> list[RowStats]:
    """What `generate` did for each prompt. The target is left as it was."""
    target: Any = drafts.teacher.target
    verification = "auto" if deployment.drafts_greedily else deployment.verification
    rows = []
    enable(
        target,
        drafter=load_drafter(drafts.head, target, with_suffix=False),  # it is the head that is measured
        draft_tokens=drafts.settings.depth,
        verification=verification,
        draft_temperature=deployment.draft_temperature,
        adaptive=False,
    )
    try:
        torch.manual_seed(seed)
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=target.device)
            output = target.generate(ids, speculative=True, **_arguments(deployment, tokens))
            rows.append(output.speculation.rows[0])
    finally:
        disable(target)
    return rows


def _arguments(deployment: Deployment, tokens: int) -> Mapping[str, Any]:
    sampling = deployment.sampling
    common = {"max_new_tokens": tokens, "return_dict_in_generate": True}
    if sampling.is_greedy:
        return {**common, "do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    own = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return {**common, "do_sample": True, **own}


def merged(parts: Sequence[Evaluation]) -> Evaluation:
    """Evaluations of different texts as one."""
    whole = Evaluation(parts[0].depth, parts[0].deployments)
    for part in parts:
        whole.ranks += part.ranks
        for name, sums in part.sums.items():
            whole.sums[name].values += sums.values
            whole.sums[name].rounds += sums.rounds
            whole.sums[name].replies += sums.replies
    return whole


def _at(counts: Sequence[int], place: int) -> int:
    return counts[place] if place < len(counts) else 0
