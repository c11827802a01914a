"""Heads together with an adapter of their target (Cai et al. 2024, Medusa-2).

The heads get hidden states that are easier to draft from, and the adapted target is held to what it said without the adapter.

The loss is the heads', on the adapted target's hidden states and against its law, plus a weight times KL(p0‖p) per trained
token, p0 the law of the target without its adapter: self-distillation, so that text of the target's own is data enough.

Shapes: R roots, t the target's hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from ..adapters import adapt, unadapted
from ..heads import MedusaHeads
from ..heads.target_parts import transform_logits
from ..processors import in_full_precision
from ..target import Pass
from .batch import TrainingBatch
from .chunked import chunked_loss
from .step import DraftTraining, StepOutput, TrainingSettings
from .teacher import Teacher, TeacherStates


class AdaptedTeacher(Teacher):
    """A target whose adapter is trained: its hidden states lead gradients to that.

    Attributes:
        is_adapting: Whether they do; in the first stage the heads learn alone.
    """

    is_adapting = False

    def __call__(self, batch: TrainingBatch, precision: torch.dtype | None = None) -> TeacherStates:
        """One pass over a batch (`Teacher`)."""
        if not (self.is_adapting and torch.is_grad_enabled()):
            return super().__call__(batch, precision)
        layers = [self.parts.layers]
        wanted = compat.hidden_states_request(layers, None)
        outputs = self.target(**self._inputs(batch), use_cache=False, output_hidden_states=wanted, return_dict=True)
        last = Pass.of(outputs).features(layers)
        assert last is not None
        given = self._checked(batch, last, last)
        return TeacherStates(given.features, given.last_hidden.detach(), given.is_finite)

    @torch.no_grad()
    def before(self, batch: TrainingBatch) -> Tensor:
        """The last hidden states `[B, T, t]` of the target without its adapter."""
        with unadapted(self.target):
            return super().__call__(batch).last_hidden


class JointTraining(DraftTraining):
    """Medusa heads and their target's adapter in training.

    Args:
        head: The heads.
        teacher: The target; it is given an adapter.
        settings: What is trained.
        adapter: The adapter's config, of peft's.
        self_distillation: The weight of KL(p0‖p).

    Raises:
        ValueError: if the heads do not fit, or are of another kind.
    """

    def __init__(self, head: Any, teacher: AdaptedTeacher, settings: TrainingSettings, adapter: Any, self_distillation: float):
        if not isinstance(head, MedusaHeads):
            raise ValueError("An adapter of the target is trained with Medusa heads, not with EAGLE's.")
        super().__init__(head, teacher, settings)
        adapt(teacher.target, adapter)
        head.config.target_adapter = True
        weights = [weight for weight in teacher.target.parameters() if weight.requires_grad]
        self.adapter = nn.ParameterList(weights)
        self.self_distillation = self_distillation
        self._planned: Any = None

    def forward(self, batch: TrainingBatch) -> StepOutput:
        """The loss of a batch; its gradients reach the heads' weights and, in the second stage, the adapter's."""
        output = super().forward(batch)
        teacher = self.teacher
        assert isinstance(teacher, AdaptedTeacher)
        plan, self._planned = self._planned, None
        # In the first stage the adapter has a gradient of zero: processes wait for one from every weight.
        held = torch.stack([weight.sum() * 0 for weight in self.adapter]).sum()
        if teacher.is_adapting and torch.is_grad_enabled() and plan is not None and len(plan.roots):
            held = held + self.self_distillation * self._divergence(plan, teacher.before(batch))
        return dataclasses.replace(output, loss_sum=output.loss_sum + held)

    def _plan(self, batch: TrainingBatch) -> Any:
        self._planned = super()._plan(batch)
        return self._planned

    def _divergence(self, plan: Any, before: Tensor) -> Tensor:
        """Σ KL(p0‖p) over the trained tokens, chunk by chunk."""
        rows, places = plan.roots.rows.to(before.device), plan.roots.places.to(before.device)
        adapted, known = plan.given.features[rows, places], before[rows, places]

        def loss_of(chunk: slice, states: Tensor) -> Tensor:
            target = self.teacher.logits(known[chunk]).log_softmax(dim=-1)
            own = self._logits(states[0]).log_softmax(dim=-1)
            return nn.functional.kl_div(own, target, reduction="sum", log_target=True)

        return chunked_loss(loss_of, plan.chunks(self._chunk_roots()), adapted[None], [])

    def _logits(self, hidden: Tensor) -> Tensor:
        """As `Teacher.logits`, with gradients."""
        parts = self.teacher.parts
        logits = transform_logits(parts.output(hidden), parts.logit_scale, parts.final_logit_softcapping)
        return in_full_precision(logits if parts.final_bias is None else logits + parts.final_bias)
