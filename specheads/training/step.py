"""One training step: a batch of texts to a loss, whatever the head.

The sum of losses and the number of trained tokens are kept apart: what is divided by what is for the trainer, who knows all the
batches of an optimiser's step. So the loss depends on neither padding, nor how a batch is split, nor how many processes work
on it.

Shapes: B rows, T tokens, R roots, K depths, V the target's vocabulary, D the draft's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..heads import DraftHead, EagleHead, MedusaHeads
from ..heads.target_parts import parts_of
from ..processors import in_full_precision
from .batch import Roots, TrainingBatch
from .chunked import chunked_loss
from .drafting import DepthOutput, Drafts
from .eagle_step import EagleDrafts
from .laws import DraftVocabulary, Laws, Sampling, TargetLaws
from .losses import Objective
from .medusa_step import MedusaDrafts
from .metrics import Evaluation, TrainingSums
from .on_policy import RoundStarts
from .teacher import Teacher, TeacherStates
from .weights import DepthWeights

# How heads draft in training, by kind.
DRAFTS: dict[type[DraftHead], type[EagleDrafts] | type[MedusaDrafts]] = {EagleHead: EagleDrafts, MedusaHeads: MedusaDrafts}
# How many logits a chunk has, all depths together, unless said otherwise. Fewer mean that the output layer's gradient, as large
# as the layer, is summed up more often.
CHUNK_LOGITS = {"cpu": 2**24}
OTHER_CHUNK_LOGITS = 2**26


@dataclass(frozen=True)
class TrainingSettings:
    """What is trained, and how.

    Args:
        depth: K, how many tokens a draft has in training.
        objective: What is made small.
        weights: How much each depth counts.
        sampling: How the target will be served. Its law is warped so; the draft's by temperature only, so that every token has
            a gradient.
        confidence_weight: The weight of the confidence head's loss, if the head has one.
        on_policy: Between 0 and 1: how far roots count by how likely a round of drafting starts there, not all the same.
        feature_noise: Half the width of uniform noise on the target's features (EAGLE: 0.1).
        chunk_roots: How many roots have logits at once; `None` for what suits the device.

    Raises:
        ValueError: if a value is out of range.
    """

    depth: int
    objective: Objective = field(default_factory=lambda: Objective.parse("lk_log"))
    weights: DepthWeights = field(default_factory=DepthWeights)
    sampling: Sampling = field(default_factory=Sampling)
    confidence_weight: float = 1.0
    on_policy: float = 0.0
    feature_noise: float = 0.0
    chunk_roots: int | None = None

    def __post_init__(self) -> None:
        if self.depth < 1 or (self.chunk_roots is not None and self.chunk_roots < 1):
            raise ValueError(f"`depth` and `chunk_roots` must be at least 1, got {self.depth} and {self.chunk_roots}.")
        if not 0 <= self.on_policy <= 1 or self.confidence_weight < 0 or self.feature_noise < 0:
            raise ValueError(
                "`on_policy` must be between 0 and 1 and `confidence_weight` and `feature_noise` at least 0, got "
                f"{self.on_policy}, {self.confidence_weight} and {self.feature_noise}."
            )
        if self.sampling.is_greedy:
            raise ValueError(
                "A target that is served greedily has no law to learn from; train with a temperature above 0, or with "
                "`cross_entropy` on greedy text, and measure with `Deployment(Sampling(temperature=0))`."
            )


@dataclass
class StepOutput:
    """What a step gives.

    Args:
        loss_sum: The sum of the loss over all trained tokens.
        trained: How many there were.
        sums: What training reports, to be added up over batches and processes.
    """

    loss_sum: Tensor
    trained: int
    sums: TrainingSums


class DraftTraining(nn.Module):
    """A head in training. Its only weights are the head's; the target is no part of it.

    Args:
        head: The head; it is bound to the teacher's target.
        teacher: The frozen target.
        settings: What is trained.

    Raises:
        ValueError: if the head does not fit the target or the settings.
        TypeError: if nothing trains heads of its kind.
    """

    def __init__(self, head: DraftHead, teacher: Teacher, settings: TrainingSettings):
        super().__init__()
        kind = next((kind for kind in DRAFTS if isinstance(head, kind)), None)
        if kind is None:
            raise TypeError(f"Heads of the kind {type(head).__name__} are not trained here.")
        DRAFTS[kind].check_depth(head, settings.depth)
        head.bind(teacher.target)
        layers = head.config.feature_layers or [parts_of(teacher.target).layers]
        if teacher.feature_layers != layers:
            raise ValueError(f"The head reads the layers {layers}, and the teacher gives {teacher.feature_layers}.")
        self.head, self.drafts, self.settings = head, DRAFTS[kind], settings
        self._teacher = [teacher]  # a list, so that it is not among the modules

    @property
    def teacher(self) -> Teacher:
        """The frozen target."""
        return self._teacher[0]

    def forward(self, batch: TrainingBatch) -> StepOutput:
        """The loss of a batch; its gradients reach the head's weights.

        Args:
            batch: The texts.
        """
        plan = self._plan(batch)
        sums = TrainingSums.empty(self.settings.depth)
        if not len(plan.roots):
            nothing = sum(parameter.sum() * 0 for parameter in self._weights())
            return StepOutput(torch.as_tensor(nothing), 0, sums)
        starts = RoundStarts(batch.input_ids.shape[1])

        def loss_of(chunk: slice, states: Tensor) -> Tensor:
            return self._chunk_loss(plan, chunk, states, starts, sums)

        loss = chunked_loss(loss_of, plan.chunks(self._chunk_roots()), plan.drafts.states, self._weights())
        return StepOutput(loss, len(plan.roots), sums)

    @torch.no_grad()
    def evaluate(self, batch: TrainingBatch, evaluation: Evaluation) -> None:
        """Measures how drafts would fare on texts that the target wrote.

        Args:
            batch: The texts.
            evaluation: Takes in what is found.
        """
        plan = self._plan(batch)
        evaluation.start(batch.input_ids.shape[1])
        for chunk in plan.chunks(self._chunk_roots()) if len(plan.roots) else []:
            roots = plan.roots.only(torch.arange(len(plan.roots))[chunk])
            scores, places = self._target_scores(plan, roots)
            evaluation.open(roots, scores, plan.vocabulary)
            for step in self._steps(plan, roots, chunk, plan.drafts.states[:, chunk], places):
                evaluation.add(step.depth, step.chosen, step.at, step.output, plan.vocabulary.index(step.tokens))
            evaluation.close()

    def _plan(self, batch: TrainingBatch) -> _Plan:
        given = self.teacher(batch)
        if self.training and torch.is_grad_enabled() and self.settings.feature_noise:
            width = self.settings.feature_noise
            given.features = given.features + torch.empty_like(given.features).uniform_(-width, width)
        roots = Roots.of(batch, self.settings.depth)
        if not bool(given.is_finite.all()):
            roots = roots.only(given.is_finite.cpu()[roots.rows])
        vocabulary = DraftVocabulary(self.head.draft_ids, self.teacher.parts.vocab_size)
        made = self.drafts(self.head, batch, given, roots, self.settings.depth) if len(roots) else None
        return _Plan(batch, given, roots, vocabulary, made)

    def _chunk_loss(self, plan: _Plan, chunk: slice, states: Tensor, starts: RoundStarts, sums: TrainingSums) -> Tensor:
        settings = self.settings
        roots = plan.roots.only(torch.arange(len(plan.roots))[chunk])
        scores, places = self._target_scores(plan, roots)
        target = TargetLaws.of(settings.sampling.warp(scores), plan.vocabulary.ids)
        del scores
        losses, found = [], _Found.nothing(len(roots), settings.depth, target.mass)
        for step in self._steps(plan, roots, chunk, states, places):
            laws = self._laws(plan, roots, step, target)
            loss = settings.objective(laws)
            if step.output.confidence is not None and settings.confidence_weight:
                confidence = binary_cross_entropy_with_logits(
                    in_full_precision(step.output.confidence), laws.acceptance.detach(), reduction="none"
                )
                loss = loss + settings.confidence_weight * confidence
            losses.append((step, loss))
            found.note(step, laws, loss)
        weights = settings.weights(found.acceptance, found.trained)
        if settings.on_policy:
            chances = starts.at(roots, found.ratio.cumprod(dim=1).cpu()).to(weights.device)
            weights = weights * (1 - settings.on_policy + settings.on_policy * chances)[:, None]
        sums.add(found.acceptance, found.ratio, found.loss, found.trained)
        parts = [(weights[step.chosen.to(weights.device), step.depth] * loss).sum() for step, loss in losses]
        return torch.stack(parts).sum()

    def _laws(self, plan: _Plan, roots: Roots, step: _Step, target: TargetLaws) -> Laws:
        temperature = self.settings.sampling.temperature
        logits = in_full_precision(step.output.logits)
        return Laws(
            logits if temperature == 1 else logits / temperature,
            target.rows(step.at),
            plan.vocabulary.index(step.tokens),
            step.output.states,
            plan.last_hidden(roots.only(step.chosen), step.depth) if step.output.states is not None else None,
        )

    def _steps(self, plan: _Plan, roots: Roots, chunk: slice, states: Tensor, places: Tensor) -> Iterator[_Step]:
        """What the head says at each depth of a chunk, for the roots that are trained so deep."""
        device, columns = states.device, plan.batch.input_ids.shape[1]
        by_depth = [(roots.depths > depth).nonzero()[:, 0] for depth in range(int(roots.depths.max()))]
        numbers = torch.arange(chunk.start, chunk.stop, device=device)
        outputs = plan.drafts.read(states, numbers, [chosen.to(device) for chosen in by_depth])
        for depth, (chosen, output) in enumerate(zip(by_depth, outputs, strict=True)):
            some = roots.only(chosen)
            tokens = plan.batch.input_ids[some.rows.to(device), (some.places + depth + 1).to(device)]
            yield _Step(depth, chosen, torch.searchsorted(places, some.flat(columns) + depth), output, tokens)

    def _target_scores(self, plan: _Plan, roots: Roots) -> tuple[Tensor, Tensor]:
        """The target's logits `[U, V]` that judge some roots' drafts, and of which places `[U]` of the flattened batch."""
        flat = roots.flat(plan.batch.input_ids.shape[1])
        judged = [(flat + depth)[roots.depths > depth] for depth in range(self.settings.depth)]
        places = torch.cat(judged).unique()
        hidden = plan.given.last_hidden.flatten(0, 1)[places.to(plan.given.last_hidden.device)]
        return self.teacher.logits(hidden), places

    def _chunk_roots(self) -> int:
        if self.settings.chunk_roots is not None:
            return self.settings.chunk_roots
        most = CHUNK_LOGITS.get(self.head.device.type, OTHER_CHUNK_LOGITS)
        return max(8, most // (self.settings.depth * self.head.config.own_vocab_size + self.teacher.parts.vocab_size))

    def _weights(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.head.parameters() if parameter.requires_grad]


@dataclass
class _Plan:
    """A batch with everything that its chunks need."""

    batch: TrainingBatch
    given: TeacherStates
    roots: Roots
    vocabulary: DraftVocabulary
    made: Drafts | None

    @property
    def drafts(self) -> Drafts:
        assert self.made is not None
        return self.made

    def chunks(self, size: int) -> list[slice]:
        return [slice(start, min(start + size, len(self.roots))) for start in range(0, len(self.roots), size)]

    def last_hidden(self, roots: Roots, depth: int) -> Tensor:
        """The target's last hidden states `[N, t]` that the head's own stand for after reading the token at that depth."""
        device = self.given.last_hidden.device
        return self.given.last_hidden[roots.rows.to(device), (roots.places + depth).to(device)]


@dataclass
class _Step:
    """One depth of a chunk: which of its roots go so deep, where the target judges them, what the head says, and the text."""

    depth: int
    chosen: Tensor
    at: Tensor
    output: DepthOutput
    tokens: Tensor


@dataclass
class _Found:
    """What is known of a chunk besides its gradients, `[R, K]` each: α, min(1, q/p) of the text's token, the loss."""

    acceptance: Tensor
    ratio: Tensor
    loss: Tensor
    trained: Tensor

    @classmethod
    def nothing(cls, roots: int, depth: int, like: Tensor) -> _Found:
        nothing = torch.zeros(roots, depth, dtype=like.dtype, device=like.device)
        return cls(nothing, nothing.clone(), nothing.clone(), nothing.bool())

    @torch.no_grad()
    def note(self, step: _Step, laws: Laws, loss: Tensor) -> None:
        places = step.chosen.to(self.loss.device)
        self.acceptance[places, step.depth] = laws.acceptance.detach()
        self.ratio[places, step.depth] = laws.token_ratio.detach().clamp(max=1)
        self.loss[places, step.depth] = loss.detach()
        self.trained[places, step.depth] = True
