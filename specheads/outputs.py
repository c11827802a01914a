"""What `generate` returns of every step: scores, logits, hidden states and attentions.

A step of plain decoding is a node of some round here. What the round's pass gave at the kept nodes is collected row by row, and
put together step by step at the end.

Shapes: B rows, n tokens of a pass, K kept tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import compat
from .target import ModelRunner, Pass

WANTED = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


@dataclass
class Step:
    """What one step gave for one row.

    Args:
        scores: `[V]` processed.
        logits: `[V]`.
        hidden_states: `[1, H]` per layer.
        attentions: `[heads, 1, columns]` per layer.
        cross_attentions: `[heads, 1, encoder length]` per layer.
    """

    scores: Tensor | None
    logits: Tensor | None
    hidden_states: tuple[Tensor | None, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None


class StepOutputs:
    """Collects what a call is to return of every step.

    Args:
        generation_config: The settings of `generate`.
        batch_size: B.
        prompt: What the pass over the prompt gave.
    """

    def __init__(self, generation_config: Any, batch_size: int, prompt: Pass):
        self.scores, self.logits, self.hidden_states, self.attentions = (
            bool(generation_config.return_dict_in_generate and getattr(generation_config, name)) for name in WANTED
        )
        self.chosen = _chosen(generation_config.output_hidden_states)
        self.prompt = replace(prompt, hidden_states=self._shown(prompt.hidden_states))
        self.steps: list[list[Step]] = [[] for _ in range(batch_size)]

    @property
    def are_wanted(self) -> bool:
        """Whether anything is to be collected."""
        return self.scores or self.logits or self.hidden_states or self.attentions

    def record(
        self, row: int, line: int, nodes: Sequence[int], scores: Tensor | None, given: Pass, target: ModelRunner
    ) -> None:
        """Takes what a pass gave along a row's kept path.

        Args:
            row: The batch row.
            line: Its line in the pass.
            nodes: The nodes, from the root down.
            scores: `[K, V]` processed, if they are wanted.
            given: The pass.
            target: What made it, its round not yet committed.
        """
        if not target.written:  # the prompt's layers are returned whole
            given = Pass(given.logits)
        states = self._shown(given.hidden_states)
        for index, node in enumerate(nodes):
            self.steps[row].append(
                Step(
                    scores=None if scores is None else scores[index].float(),
                    logits=given.logits[line, node].float() if self.logits else None,
                    hidden_states=_at(states, lambda state, node=node: state[line, node, None]),
                    attentions=_at(
                        target.columns_attended(given.attentions, line, nodes[: index + 1]),
                        lambda weights, node=node: weights[:, node, None],
                    ),
                    cross_attentions=_at(given.cross_attentions, lambda weights, node=node: weights[line, :, node, None]),
                )
            )

    def collected(self, is_encoder_decoder: bool) -> dict[str, Any]:
        """The fields of the output, by name."""
        prefix = "decoder_" if is_encoder_decoder else ""
        steps = list(zip(*self.steps, strict=True))
        fields: dict[str, Any] = {}
        for name in ("scores", "logits"):
            if getattr(self, name):
                fields[name] = tuple(torch.stack([getattr(row, name) for row in step]) for step in steps)
        for name, wanted in (
            ("hidden_states", self.hidden_states),
            ("attentions", self.attentions),
            ("cross_attentions", self.attentions and is_encoder_decoder),
        ):
            if wanted:
                later = (_by_layer([getattr(row, name) for row in step]) for step in steps[1:])
                # The first step is the prompt's, with all its columns.
                key = name if name == "cross_attentions" else f"{prefix}{name}"
                fields[key] = (getattr(self.prompt, name), *later)
        return fields

    def _shown(self, states: tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...] | None:
        """The hidden states that the call is to return: a pass may hold others, which the drafter asked for."""
        if states is None or not self.hidden_states:
            return None
        if self.chosen is None:
            return states
        chosen = {layer % len(states) for layer in self.chosen if -len(states) <= layer < len(states)}
        return tuple(state if layer in chosen else None for layer, state in enumerate(states))


def _chosen(asked: Any) -> list[int] | None:
    """The hidden states that a user picked, `None` for all: transformers takes a flag, an index or a list of them."""
    if isinstance(asked, bool) or asked is None or not compat.SELECTS_HIDDEN_STATES:
        return None
    return [asked] if isinstance(asked, int) else list(asked)


def _at(layers: tuple[Any, ...] | None, pick: Any) -> tuple[Any, ...] | None:
    return None if layers is None else tuple(None if layer is None else pick(layer) for layer in layers)


def _by_layer(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """One tensor `[B, ...]` per layer from each row's."""
    return tuple(None if layer[0] is None else torch.stack(layer) for layer in zip(*rows, strict=True))
