"""Processors of the target's scores: quicker ways to the same values, and what they are trusted with."""

from __future__ import annotations

import pytest
import torch
import transformers.generation.logits_process as hf
from transformers import LogitsProcessorList, StoppingCriteriaList, TopKLogitsWarper

from specheads.blocks import BLOCK
from specheads.processors import POINTWISE, RoundLaws, ScoreProcessors
from specheads.sequences import Sequences
from specheads.tree import DraftTree

VOCAB_SIZE = 40 * BLOCK
MADE: dict[type, object] = {
    kind: kind(*arguments)
    for kind, arguments in {
        hf.TemperatureLogitsWarper: (0.5,),
        hf.TopKLogitsWarper: (8,),
        hf.TopPLogitsWarper: (0.5,),
        hf.MinPLogitsWarper: (0.1,),
        hf.TypicalLogitsWarper: (0.5,),
        hf.EpsilonLogitsWarper: (1e-3,),
        hf.EtaLogitsWarper: (1e-3, -torch.inf, 1, "cpu"),
        hf.InfNanRemoveLogitsProcessor: (),
        hf.LogitNormalization: (),
        hf.SuppressTokensLogitsProcessor: ([3, 5],),
        **({hf.TopHLogitsWarper: (0.5,)} if hasattr(hf, "TopHLogitsWarper") else {}),
    }.items()
}


def processors_of(*processors: object) -> ScoreProcessors:
    sequences = Sequences(torch.ones(2, 3, dtype=torch.long), StoppingCriteriaList(), 9, None)
    return ScoreProcessors(LogitsProcessorList(processors), sequences)


def test_every_pointwise_processor_is_looked_at() -> None:
    assert set(MADE) == POINTWISE


@pytest.mark.parametrize("kind", sorted(POINTWISE, key=lambda kind: kind.__name__))
def test_pointwise_processors_do_not_write_into_what_they_are_given(kind: type) -> None:
    """The scores at the roots are the pass's own: drafters read them afterwards."""
    logits = torch.randn(2, 4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    laws = RoundLaws(logits, [0, 1], processors_of(MADE[kind]))
    scores = laws.at([0, 1], torch.zeros(2, dtype=torch.long), torch.empty(2, 0, dtype=torch.long))
    assert scores.shape == (2, VOCAB_SIZE)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("filter_value", [-torch.inf, -1e4])
def test_top_k_gives_the_processors_values(filter_value: float) -> None:
    warper = TopKLogitsWarper(8, filter_value=filter_value)
    logits = torch.randn(2, 3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    tree = DraftTree.chain(torch.ones(2, 2, dtype=torch.long))
    scores = RoundLaws(logits, [0, 1], processors_of(warper)).everywhere(tree)
    assert torch.equal(scores.flatten(0, 1), warper(None, logits.flatten(0, 1)))
