"""The teacher: the frozen target, for its hidden states and its laws.

A pass keeps the hidden states that the head reads and the last one. Logits are computed from that one, chunk by chunk, where a
loss needs them: for a whole batch they would be the largest tensor by far.

Shapes: B rows, T tokens, L feature layers, t the target's hidden size, V its vocabulary, N positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import compat
from ..families import family_of
from ..heads.target_parts import parts_of, transform_logits
from ..processors import in_full_precision
from ..target import Pass
from .batch import TrainingBatch
from .masks import additive, alone, visible_before

# How far the logits of a pass may be from those of its last hidden state, as a share of their range.
TOLERANCE = {torch.double: 1e-6, torch.float: 1e-3, torch.bfloat16: 0.1, torch.half: 0.05}
LEAST_ROWS = 100  # below that many, a share of bad rows says nothing


@dataclass
class TeacherStates:
    """What a pass of the target gave.

    Args:
        features: `[B, T, L t]` the hidden states that the head reads, side by side.
        last_hidden: `[B, T, t]` what the output layer reads.
        is_finite: `[B]` bool: rows whose states are all numbers; those of the others are zero.
    """

    features: Tensor
    last_hidden: Tensor
    is_finite: Tensor


class Teacher:
    """A frozen target.

    Args:
        target: The target; it is set to evaluation.
        feature_layers: The layers that the head reads, as indices into `hidden_states`; the last one if there are none.
        most_bad: The share of rows with states that are not finite above which training stops.

    Raises:
        ValueError: if the target has an encoder, or its output layer does not give its logits.
    """

    def __init__(self, target: PreTrainedModel, feature_layers: Sequence[int] = (), most_bad: float = 0.01):
        if target.config.is_encoder_decoder:
            raise ValueError(
                f"Heads are trained on texts alone, and {type(target).__name__} reads an encoder's too; train for a "
                "decoder-only target."
            )
        self.target = target.eval()
        self.parts = parts_of(target)
        self.feature_layers = list(feature_layers) or [self.parts.layers]
        self.most_bad = most_bad
        self.rows_seen = self.rows_skipped = 0
        self._is_proven = False

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch, precision: torch.dtype | None = None) -> TeacherStates:
        """One pass over a batch, unless the batch brings what it would give.

        Args:
            batch: The texts.
            precision: Of the states; `None` for the target's.

        Raises:
            ValueError: if rows are packed, or padded on the left, and the target's family takes no masks of one's own.
            FloatingPointError: if too many rows had states that are not finite.
        """
        if batch.features is not None:
            return self._checked(batch, batch.features, batch.features if batch.last_hidden is None else batch.last_hidden)
        layers = sorted({*self.feature_layers, self.parts.layers})
        wanted = compat.hidden_states_request(layers, None)
        outputs = self.target(**self._inputs(batch), use_cache=False, output_hidden_states=wanted, return_dict=True)
        given = Pass.of(outputs)
        features, last = given.features(self.feature_layers), given.features([self.parts.layers])
        assert features is not None and last is not None
        self._prove(last[:, -1], given.logits[:, -1], batch.attention_mask[:, -1].bool())
        return self._checked(batch, features.to(precision or features.dtype), last.to(precision or last.dtype))

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """The target's logits `[N, V]`, in single precision at least, from its last hidden states `[N, t]`."""
        parts = self.parts
        hidden = last_hidden.to(parts.output_weight.dtype)
        logits = transform_logits(parts.output(hidden), parts.logit_scale, parts.final_logit_softcapping)
        logits = logits if parts.final_bias is None else logits + parts.final_bias
        return in_full_precision(logits)

    def _inputs(self, batch: TrainingBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": self._mask(batch)}
        if "position_ids" in inspect.signature(self.target.forward).parameters:
            inputs["position_ids"] = batch.position_ids
        if self.target._supports_logits_to_keep():
            inputs["logits_to_keep"] = 1
        return inputs

    def _mask(self, batch: TrainingBatch) -> Any:
        """A 2-D mask where texts begin their rows; else one of our own, under which padding sees itself."""
        texts = batch.segment_ids
        if texts is None and bool(batch.attention_mask[:, 0].all()):
            return batch.attention_mask.long()
        family = family_of(self.target)
        if not family.takes_trees:
            raise ValueError(
                f"Each text must begin its row with {type(self.target).__name__}, which makes its own attention masks; train "
                "without packing, and pad on the right."
            )
        texts = torch.zeros_like(batch.input_ids) if texts is None else texts
        groups = alone(texts, ~batch.attention_mask.bool())
        windows = {getattr(layer, "sliding_window", None) for layer in compat.new_cache(self.target).layers} or {None}
        masks = {window: additive(visible_before(groups, window), self.target.dtype) for window in windows}
        if not family.masks_by_layer_type:
            (mask,) = masks.values()
            return mask
        return {"sliding_attention" if window else "full_attention": mask for window, mask in masks.items()}

    def _prove(self, last: Tensor, logits: Tensor, exists: Tensor) -> None:
        """Checks once, at some places `[N]` of which those count that exist, that the logits are the last hidden states'."""
        exists = exists & last.isfinite().all(-1)
        if self._is_proven or not bool(exists.any()):
            return
        own, theirs = self.logits(last[exists]), in_full_precision(logits[exists])
        if not bool(((own - theirs).abs() <= TOLERANCE[self.target.dtype] * theirs.abs().max()).all()):
            raise ValueError(
                f"The logits of {type(self.target).__name__} are not those of its output layer on its last hidden state, so "
                "its laws cannot be had in chunks; heads cannot be trained for it."
            )
        self._is_proven = True

    def _checked(self, batch: TrainingBatch, features: Tensor, last: Tensor) -> TeacherStates:
        padding = ~batch.attention_mask.bool()
        is_finite = torch.stack([(state.isfinite().all(-1) | padding).all(-1) for state in (features, last)]).all(0)
        self.rows_seen += len(is_finite)
        bad = int((~is_finite).sum())
        if bad:
            self.rows_skipped += bad
            self._stop_if_too_many()
        if bad or bool(padding.any()):
            # Under a mask, 0 times not a number is not a number.
            hidden = (padding | ~is_finite[:, None])[:, :, None]
            features, last = features.masked_fill(hidden, 0), last.masked_fill(hidden, 0)
        return TeacherStates(features, last, is_finite)

    def _stop_if_too_many(self) -> None:
        if self.rows_skipped > self.most_bad * max(self.rows_seen, LEAST_ROWS):
            raise FloatingPointError(
                f"{self.rows_skipped} of {self.rows_seen} texts have hidden states of the target that are not finite, more "
                f"than {self.most_bad:.1%}; run the target in float32 or bfloat16, or look at the data."
            )
