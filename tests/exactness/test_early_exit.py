"""The target's own first layers as the drafter, on the target's own keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specheads
from specheads.cache import SlotCache
from specheads.drafters import load_drafter
from specheads.drafters.early_exit import EarlyExitDrafter, promised_speed, with_first_layers
from specheads.heads.target_parts import parts_of
from specheads.target import SlotRunner

from ..tiny import tiny
from .test_greedy import NEW_TOKENS, other_target, prompt
from .whole_loop import SMALL, distance

FAMILIES = ["llama", "qwen2", "mistral", "gemma3_text", "gpt2", "opt", "t5", "deepseek_v3"]
TREE = {"draft_tokens": 4, "tree_nodes": 9, "adaptive": False}
CHAIN = {"draft_tokens": 3, "adaptive": False}


def small_target() -> PreTrainedModel:
    target = tiny("llama", 3, spread=0.9, **{**SMALL, "num_hidden_layers": 2}, eos_token_id=None)
    return specheads.enable(target, drafter="early-exit:1")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_plain(family: str) -> None:
    target = specheads.enable(other_target(family), drafter="early-exit:1")
    accepted = 0
    for batch in (1, 4):
        settings = {**prompt(family, batch), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        plain = target.generate(**settings)
        for speculative in (CHAIN, TREE):
            out = target.generate(**settings, speculative=speculative, return_dict_in_generate=True)
            assert torch.equal(out.sequences, plain), (batch, speculative)
            accepted += out.speculation.num_accepted_draft_tokens
    assert accepted


@pytest.mark.parametrize(
    ("speculative", "setting", "batch"),
    [
        ({"draft_tokens": 2}, "warped", 1),
        ({"draft_tokens": 2, "verification": "token"}, "repetition", 1),
        ({"draft_tokens": 2, "tree_nodes": 3}, "warped", 1),
        ({"draft_tokens": 2}, "warped", 2),
    ],
)
def test_replay(speculative: dict[str, Any], setting: str, batch: int) -> None:
    tokens = 4 if setting == "warped" and batch == 1 else 3
    assert distance(small_target(), None, {**speculative, "adaptive": False}, setting, batch, tokens)[0] < 1e-9


def drafts_and_laws(family: str, patch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Each pass's tokens so far, prompt included, and the drafter's logits after them; and the model without a cache."""
    target = specheads.enable(other_target(family), drafter="early-exit:1")
    shallow = with_first_layers(target, 1)
    seen: list[tuple[Tensor, Tensor]] = []
    follow = EarlyExitDrafter.follow
    texts: list[list[int]] = []

    def noted(self: EarlyExitDrafter, tokens: Tensor, depth: int) -> Tensor:
        logits = follow(self, tokens, depth)
        if depth == 0:
            texts.append(context[0].tokens(0))
        else:
            texts.append([*texts[-1], int(tokens[0])])
        with torch.no_grad():
            seen.append((logits[0], shallow(torch.tensor([texts[-1]])).logits[0, -1]))
        return logits

    context: list[Any] = []
    start = EarlyExitDrafter.start
    patch.setattr(EarlyExitDrafter, "follow", noted)
    patch.setattr(
        EarlyExitDrafter, "start", lambda self, given: (context.clear(), context.append(given), start(self, given))[2]
    )
    target.generate(**prompt(family, 1), max_new_tokens=NEW_TOKENS, do_sample=False, speculative=CHAIN)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_what_the_first_layers_say(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the shared keys and values the draft is what the first layers say of the whole text."""
    seen = drafts_and_laws(family, monkeypatch)
    assert len(seen) > 10
    for given, wanted in seen:
        assert torch.allclose(given, wanted, atol=1e-9)


def kept_draft(patch: pytest.MonkeyPatch) -> None:
    """What the draft wrote counts as committed."""
    propose = EarlyExitDrafter.propose

    def mistaken(self: EarlyExitDrafter, context: Any, budget: Any) -> Any:
        tree = propose(self, context, budget)
        if tree.size and isinstance(context.target, SlotRunner):
            layout = context.target.slots.layout
            layout.set_lengths([length + 1 for length in layout.lengths])
        return tree

    patch.setattr(EarlyExitDrafter, "propose", mistaken)


def written_over(patch: pytest.MonkeyPatch) -> None:
    """The draft writes over the last committed token."""
    opened = SlotCache.open

    def mistaken(self: SlotCache, written: int, size: int) -> None:
        opened(self, written - (len(self.layers) == 1), size)

    patch.setattr(SlotCache, "open", mistaken)


@pytest.mark.parametrize("mistake", [kept_draft, written_over])
def test_the_comparison_sees(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    target = specheads.enable(tiny("llama"), drafter="early-exit:1")
    settings = {**prompt("llama", 1), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    assert not torch.equal(target.generate(**settings, speculative=CHAIN), target.generate(**settings))


def test_a_draft_drawn_from_another_law_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specheads.drafters.growth.draw", lambda context, law, lines, depth: law.argmax(dim=-1))
    assert distance(small_target(), None, {"draft_tokens": 2, "adaptive": False}, "plain", 1, 3)[0] > 1e-3


def test_the_number_of_layers_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose later layers change nothing drafts best with one layer; and no one's random numbers are used up."""
    target = tiny("llama", num_hidden_layers=6)
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    state = torch.get_rng_state()
    drafter = load_drafter("early-exit", target)
    assert torch.equal(torch.get_rng_state(), state)
    assert drafter.layers == 1
    assert 0 < drafter.step_cost < 0.5
    # And where only the last layer before an exit makes the difference, with those.
    with torch.no_grad():
        target.model.layers[2].mlp.down_proj.weight.normal_(std=3.0)
    assert load_drafter("early-exit", target, prompt=torch.tensor([[5, 6, 7]])).layers == 3
    assert promised_speed(1.0, 0.25) == pytest.approx(9 / 3)
    assert promised_speed(0.0, 0.25) == pytest.approx(1 / 1.25)


def test_nothing_is_copied_or_patched() -> None:
    target = tiny("llama", num_hidden_layers=3)
    before = {name: id(module) for name, module in target.named_modules()}
    drafter = load_drafter("early-exit:2", target)
    assert {name: id(module) for name, module in target.named_modules()} == before
    assert parts_of(target).layers == len(target.model.layers) == 3
    own = {id(parameter) for parameter in target.parameters()}
    assert all(id(parameter) in own for parameter in drafter.model.parameters())


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="from 1 to 1 of the 2 layers of this model, got 2"):
        load_drafter("early-exit:2", tiny("llama"))
    with pytest.raises(ValueError, match="takes a number of layers, got 'half'"):
        load_drafter("early-exit:half", tiny("llama"))
    with pytest.raises(ValueError, match="'lfm2' models have layers with a state"):
        load_drafter("early-exit:1", tiny("lfm2"))
    with pytest.raises(ValueError, match="cannot be measured on an encoder-decoder"):
        load_drafter("early-exit", tiny("t5"))
    moved = tiny("llama")
    moved.model.forward = moved.model.forward
    with pytest.raises(ValueError, match="LlamaModel has a `forward` of its own"):
        load_drafter("early-exit:1", moved)
