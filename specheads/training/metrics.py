"""What drafts would be worth, worked out from texts that the target wrote: no roll-outs, no noise of their own.

A text that the target wrote is a draw from its law, and so is what speculative decoding emits. Given the text, each depth of a
draft is reached with a probability that follows from the two laws alone: by token verification Π min(1, q/p) of the text's
tokens, by block verification the running minimum of Π q/p, by matching Π q, and with greedy drafts whether all of them are the
text's tokens. The last factor need not be taken at the text's token: its mean over the target's law is exact, Σ min(p, q) for
token verification.

Two lengths follow. The *expected length* is 1 + E[accepted] averaged over all places of the text (the identity of the field).
What `generate` reports is tokens per round, and rounds do not start at all places alike: the *mean acceptance length* counts
the expected number of rounds of every text exactly (`RoundStarts`). Both hold for texts written under the very settings that
they are worked out for.

Shapes: R roots, N of them, K depths, U judged places, V the target's vocabulary, D the draft's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..evaluation.intervals import Interval, ratio_of_sums
from ..processors import in_full_precision
from .batch import Roots
from .drafting import DepthOutput
from .laws import DraftVocabulary, Laws, Sampling, TargetLaws
from .on_policy import RoundStarts

VERIFICATIONS = ("token", "block", "match")
RANKS = 10  # how many ranks of the draft's tokens are told apart
MOST_LIKELY = 1e30  # what Π q/p is bounded by: a text may hold a token that the settings exclude


@dataclass(frozen=True)
class Deployment:
    """How drafts will be made and verified, as chains.

    Args:
        sampling: How the target is served.
        verification: `"token"`, `"block"` or `"match"`, as in `SpeculativeConfig`; greedy drafts are always matched.
        draft_temperature: The draft's own temperature: `None` for the target's, 0 for its most probable tokens.

    Raises:
        ValueError: if there is no such verification.
    """

    sampling: Sampling = field(default_factory=Sampling)
    verification: str = "block"
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"Chains are verified by {', '.join(VERIFICATIONS)}, got {self.verification!r}.")

    @property
    def drafts_greedily(self) -> bool:
        """Whether the draft's most probable tokens are drafted."""
        return self.sampling.is_greedy or self.draft_temperature == 0

    @property
    def draft_sampling(self) -> Sampling:
        """How drafts are sampled."""
        own = self.draft_temperature
        return self.sampling if own is None else replace(self.sampling, temperature=own)


@dataclass
class TrainingSums:
    """What training reports, as sums that may be added up.

    Args:
        values: `[5, K]` by depth: how many tokens were trained; the sums of their losses and of α; of how likely the depth was
            reached, given the text; and of that times α.
    """

    values: Tensor

    @classmethod
    def empty(cls, depth: int) -> TrainingSums:
        """Sums of nothing."""
        return cls(torch.zeros(5, depth, dtype=torch.double))

    def add(self, acceptance: Tensor, ratio: Tensor, loss: Tensor, trained: Tensor) -> None:
        """Adds some roots: `[R, K]` each, zero where nothing is trained."""
        reached = before(ratio.cumprod(dim=1)) * trained
        rows = [trained.to(loss.dtype), loss, acceptance, reached, reached * acceptance]
        self.values += torch.stack([row.sum(dim=0) for row in rows]).to(self.values)

    @property
    def loss(self) -> list[float]:
        """The mean loss at each depth."""
        return _shares(self.values[1], self.values[0])

    @property
    def acceptance(self) -> list[float]:
        """The mean α at each depth, whether or not it is reached."""
        return _shares(self.values[2], self.values[0])

    @property
    def conditional_acceptance(self) -> list[float]:
        """How often a draft is accepted at each depth when all before it were, by token verification."""
        return _shares(self.values[4], self.values[3])

    @property
    def expected_length(self) -> float:
        """1 + E[accepted] over all roots, by token verification."""
        return 1 + sum(_shares(self.values[4], self.values[0, :1].expand_as(self.values[4])))


@dataclass
class DeploymentSums:
    """What is measured for one deployment, over roots that are the assistant's own tokens.

    Args:
        values: `[4, K]` by depth: how many roots had it; the sums of α there, of how likely it was reached, and of how likely
            it was reached and accepted.
        rounds: `[4, K]` the same, each root counted as often as a round is expected to start there.
        replies: For each reply, its tokens and the expected number of rounds, that over the prompt among both.
    """

    values: Tensor
    rounds: Tensor
    replies: list[list[float]] = field(default_factory=list)

    @classmethod
    def empty(cls, depth: int) -> DeploymentSums:
        """Sums of nothing."""
        return cls(torch.zeros(4, depth, dtype=torch.double), torch.zeros(4, depth, dtype=torch.double))

    @property
    def acceptance(self) -> list[float]:
        """The mean α at each depth over all places, whether or not it is reached."""
        return _shares(self.values[1], self.values[0])

    @property
    def conditional_acceptance(self) -> list[float]:
        """How often a draft from any place is accepted at each depth when all before it were."""
        return _shares(self.values[3], self.values[2])

    @property
    def acceptance_at_position(self) -> list[float]:
        """How often a round accepts at least so much, as in `SpeculationStats`."""
        return _shares(self.rounds[3], self.rounds[0])

    @property
    def conditional_acceptance_at_position(self) -> list[float]:
        """How often a round accepts at each depth when it has accepted all before it, as in `SpeculationStats`."""
        return _shares(self.rounds[3], self.rounds[2])

    @property
    def expected_length(self) -> float:
        """1 + E[accepted] over all places."""
        return 1 + sum(_shares(self.values[3], self.values[0, :1].expand_as(self.values[3])))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, as `generate` reports it."""
        tokens, rounds = torch.tensor(self.replies, dtype=torch.double).view(-1, 2).sum(dim=0).tolist()
        return tokens / rounds if rounds else 0.0

    def interval(self, seed: int = 0) -> Interval:
        """The mean acceptance length and its 95 % interval, by resampling replies."""
        tokens, rounds = zip(*self.replies, strict=True)
        return ratio_of_sums(tokens, rounds, seed)


class Evaluation:
    """Measurements over any number of batches.

    Args:
        depth: K.
        deployments: What to measure for, under names of one's choice.

    Attributes:
        sums: By name, what was measured.
        ranks: `[K, RANKS + 1]` how often the target's most probable token was the draft's first, second, ...; the last column
            counts those further down and unknown to the draft.
    """

    def __init__(self, depth: int, deployments: Mapping[str, Deployment]):
        self.deployments = dict(deployments)
        self.depth = depth
        self.sums = {name: DeploymentSums.empty(depth) for name in self.deployments}
        self.ranks = torch.zeros(depth, RANKS + 1, dtype=torch.long)

    def top_k_agreement(self, k: int) -> list[float]:
        """How often the target's most probable token is among the draft's k most probable, at each depth; k at most RANKS."""
        return _shares(self.ranks[:, :k].sum(dim=1).double(), self.ranks.sum(dim=1).double())

    @property
    def rank_accuracies(self) -> list[list[float]]:
        """For each depth, how often the draft's first, second, ... token was the target's (`MedusaConfig.head_accuracies`)."""
        return [_shares(row.double(), row.sum().expand(RANKS + 1).double())[:RANKS] for row in self.ranks]

    def include(self, other: Evaluation) -> None:
        """Adds what another one has measured for the same deployments, in another process for instance."""
        for name, sums in self.sums.items():
            sums.values += other.sums[name].values
            sums.rounds += other.sums[name].rounds
            sums.replies += other.sums[name].replies
        self.ranks += other.ranks

    def start(self, columns: int) -> None:
        """Begins a batch of rows with that many tokens."""
        self._starts = {name: RoundStarts(columns) for name in self.deployments}

    def open(self, roots: Roots, scores: Tensor, vocabulary: DraftVocabulary) -> None:
        """Begins a chunk.

        Args:
            roots: Its roots, in order.
            scores: `[U, V]` the target's logits at the places that judge their drafts.
            vocabulary: The draft's.
        """
        self._roots = roots
        self._choices = vocabulary.index(scores.argmax(dim=-1))
        self._walks = {
            name: Walk.begin(deployment, roots, scores, self._choices, vocabulary, self.depth)
            for name, deployment in self.deployments.items()
        }

    def add(self, depth: int, chosen: Tensor, at: Tensor, output: DepthOutput, tokens: Tensor) -> None:
        """Adds one depth of a chunk.

        Args:
            depth: Which, from 0 on.
            chosen: `[N]` which of the chunk's roots go so deep.
            at: `[N]` at which of its judged places their drafts are judged.
            output: What the head says.
            tokens: `[N]` the text's tokens, as indices into the draft vocabulary.
        """
        logits = in_full_precision(output.logits)
        is_deployed = self._roots.deployed[chosen].to(logits.device)
        choice = self._choices[at.to(logits.device)]
        own = logits.gather(-1, choice.clamp(min=0)[:, None])
        rank = (logits > own).sum(dim=-1).clamp(max=RANKS).masked_fill(choice < 0, RANKS)
        self.ranks[depth] += rank[is_deployed].bincount(minlength=RANKS + 1).cpu()
        for walk in self._walks.values():
            walk.add(depth, chosen, at, logits, tokens)

    def close(self) -> None:
        """Ends a chunk."""
        for name, walk in self._walks.items():
            sums, reached = self.sums[name], walk.reached.cpu()
            starts = self._starts[name]
            chances = starts.at(self._roots, reached)
            tables = walk.tables().to(sums.values)
            sums.values += tables.sum(dim=1)
            sums.rounds += (tables * chances.to(tables)[:, None]).sum(dim=1)
            for chance, begins in zip(chances.tolist(), starts.begun, strict=True):
                if begins:
                    sums.replies.append([1.0, 1.0])  # the first token, by the pass over the prompt
                if begins is not None:
                    sums.replies[-1][0] += 1
                    sums.replies[-1][1] += chance
        self._walks = {}


@dataclass
class Walk:
    """One deployment's drafts from a chunk's roots, along the text.

    Args:
        deployment: How they are drafted and verified.
        target: `[U, D]` the target's laws.
        choices: `[U]` the target's most probable tokens, -1 for those that the draft lacks.
        deployed: `[R]` bool.
        trained: `[R, K]` bool: which depths were there.
        acceptance: `[R, K]` α.
        accepted: `[R, K]` how likely the depth is accepted, given the text before it.
        reached: `[R, K]` the same, given its own token too.
        likelihood: `[R]` Π q/p of the text so far.
    """

    deployment: Deployment
    target: TargetLaws
    choices: Tensor
    deployed: Tensor
    trained: Tensor
    acceptance: Tensor
    accepted: Tensor
    reached: Tensor
    likelihood: Tensor

    @classmethod
    def begin(
        cls,
        deployment: Deployment,
        roots: Roots,
        scores: Tensor,
        choices: Tensor,
        vocabulary: DraftVocabulary,
        depth: int,
    ) -> Walk:
        """At the roots themselves (see `Evaluation.open` for the arguments)."""
        sampling = deployment.sampling
        target = TargetLaws.of(scores if sampling.is_greedy else sampling.warp(scores), vocabulary.ids)
        nothing = torch.zeros(len(roots), depth, dtype=scores.dtype, device=scores.device)
        return cls(
            deployment,
            target,
            choices,
            deployed=roots.deployed.to(scores.device),
            trained=nothing.bool(),
            acceptance=nothing.clone(),
            accepted=nothing.clone(),
            reached=nothing.clone(),
            likelihood=torch.ones_like(nothing[:, 0]),
        )

    def add(self, depth: int, chosen: Tensor, at: Tensor, logits: Tensor, tokens: Tensor) -> None:
        """One depth further (see `Evaluation.add` for the arguments)."""
        places = chosen.to(logits.device)
        before = self.reached[places, depth - 1] if depth else torch.ones_like(logits[:, 0])
        if self.deployment.drafts_greedily:
            acceptance, accepted, reached = self._greedy(at, logits, tokens, before)
        else:
            acceptance, accepted, reached = self._sampled(places, at, logits, tokens, before)
        self.trained[places, depth] = True
        for table, values in ((self.acceptance, acceptance), (self.accepted, accepted), (self.reached, reached)):
            table[places, depth] = values

    def tables(self) -> Tensor:
        """`[4, R, K]` as `DeploymentSums` adds them up."""
        present = (self.trained & self.deployed[:, None]).to(self.reached.dtype)
        tables = [torch.ones_like(present), self.acceptance, before(self.reached), self.accepted]
        return torch.stack([table * present for table in tables])

    def _greedy(self, at: Tensor, logits: Tensor, tokens: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drafted = logits.argmax(dim=-1)
        at = at.to(logits.device)
        if self.deployment.sampling.is_greedy:
            acceptance = (drafted == self.choices[at]).to(logits.dtype)
        else:
            acceptance = self.target.probs[at, drafted]
        return acceptance, before * acceptance, before * (drafted == tokens)

    def _sampled(
        self, places: Tensor, at: Tensor, logits: Tensor, tokens: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        laws = Laws(self.deployment.draft_sampling.warp(logits), self.target.rows(at), tokens)
        if self.deployment.verification == "match":
            acceptance = (laws.target.probs * laws.probs).sum(dim=-1)
            return acceptance, before * acceptance, before * laws.token_log_probs.exp()
        ratio = laws.token_ratio
        if self.deployment.verification == "token":
            return laws.acceptance, before * laws.acceptance, before * ratio.clamp(max=1)
        likelihood = self.likelihood[places]
        owed = torch.minimum(before[:, None] * laws.target.probs, likelihood[:, None] * laws.probs).sum(dim=-1)
        likelihood = (likelihood * ratio).clamp(max=MOST_LIKELY)
        self.likelihood[places] = likelihood
        return laws.acceptance, owed, torch.minimum(before, likelihood)


def before(reached: Tensor) -> Tensor:
    """How likely each depth `[R, K]` is come to, from how likely each one is accepted."""
    return torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], dim=1)


def _shares(parts: Tensor, wholes: Tensor) -> list[float]:
    return [part / whole if whole else 0.0 for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True)]
