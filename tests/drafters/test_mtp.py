"""Multi-token-prediction layers of a checkpoint: read once, drafting as the stock ones do, and never in the text."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import specheads
from specheads import compat
from specheads.drafters import load_drafter, mtp
from specheads.tree import DraftTree

from ..exactness.replay import total_variation
from ..exactness.test_greedy import prompt
from ..exactness.whole_loop import PROMPT, plain_law, speculative_law
from ..tiny import tiny

pytestmark = pytest.mark.skipif(compat.MtpModel is None, reason="this transformers builds no such layers")
SETTINGS = {"do_sample": False, "max_new_tokens": 20}


def target_with_layers(folder: Path, count: int, vocab_size: int = 32, **changes: Any) -> PreTrainedModel:
    """A DeepSeek-V3-like model, loaded from a checkpoint that has `count` layers beyond its own."""
    tiny("deepseek_v3", vocab_size, num_mtp_layers=count, **changes).float().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    with tempfile.TemporaryDirectory() as other:  # the layers have experts, whatever the model's own have
        tiny("deepseek_v3", vocab_size).float().save_pretrained(other)
        routed = load_file(Path(other) / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    width = weights["model.embed_tokens.weight"].shape[1]

    def fresh(like: Tensor) -> Tensor:
        return 0.3 * torch.randn(like.shape, generator=generator) if like.dim() > 1 else like.clone()

    more = {}
    for number in range(2, 2 + count):
        more |= {name.replace(".1.", f".{number}.", 1): fresh(own) for name, own in routed.items() if ".layers.1." in name}
        special = {name: torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
        special |= {"eh_proj": fresh(torch.empty(width, 2 * width)), "embed_tokens": fresh(weights["lm_head.weight"])}
        more |= {f"model.layers.{number}.{name}.weight": own for name, own in special.items()}
    save_file({**weights, **more}, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.set_experts_implementation("eager")
    return specheads.enable(loaded.double())


def with_mtp(target: PreTrainedModel) -> mtp.MtpDrafter:
    drafter = load_drafter("mtp", target)
    assert isinstance(drafter, mtp.MtpDrafter)
    drafter.model.layers.double()
    drafter.model.set_experts_implementation("eager")
    for stage in drafter.stages:
        stage.dtype = torch.double
    specheads.enable(target, drafter=drafter)
    return drafter


def first_draft(target: PreTrainedModel, ids: Tensor, patch: pytest.MonkeyPatch, draft_tokens: int) -> Tensor:
    """The first draft of a greedy call `[B, K]`."""
    drafts: list[DraftTree] = []
    propose = mtp.MtpDrafter.propose

    def noted(self: mtp.MtpDrafter, *arguments: Any) -> DraftTree:
        drafts.append(propose(self, *arguments))
        return drafts[-1]

    with patch.context() as inner:
        inner.setattr(mtp.MtpDrafter, "propose", noted)
        settings = {"draft_tokens": draft_tokens, "adaptive": False}
        target.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS, speculative=settings)
    return drafts[0].tokens


@pytest.mark.parametrize("count", [1, 3])
def test_drafts_are_those_of_the_stock_layers(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_with_layers(tmp_path, count)
    assert len(target.model.layers) == 2  # what transformers loads by itself
    left_out = set(target._keys_to_ignore_on_load_unexpected)
    drafter = with_mtp(target)
    assert drafter.model.shared_head is target.lm_head
    assert drafter.model.embed_tokens is target.get_input_embeddings()
    assert target._keys_to_ignore_on_load_unexpected == left_out
    ids = prompt("deepseek_v3", 1)["input_ids"]
    with torch.no_grad():
        given = target(ids, output_hidden_states=True)
        text = torch.cat([ids[:, 1:], given.logits[:, -1:].argmax(dim=-1)], dim=1)
        from transformers.cache_utils import MtpCache

        cache = MtpCache(config=target.config.get_mtp_config())
        positions = torch.arange(1, 1 + text.shape[1])[None]
        stock, _, _ = drafter.model(text, given.hidden_states[-1], None, positions, cache)
    assert first_draft(target, ids, monkeypatch, count).tolist() == stock.tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_greedy_text_is_plain(count: int, tmp_path: Path) -> None:
    target = target_with_layers(tmp_path, count)
    with_mtp(target)
    for batch in (1, 4):
        inputs = prompt("deepseek_v3", batch)
        plain = target.generate(**inputs, **SETTINGS)
        for draft_tokens in (1, 4):
            settings = {"draft_tokens": draft_tokens, "adaptive": False}
            assert torch.equal(target.generate(**inputs, **SETTINGS, speculative=settings), plain), (batch, draft_tokens)


def distance(folder: Path) -> float:
    """Total variation between speculative and plain sampling."""
    # Without experts of its own: they are chosen in single precision, and the law would be as exact as that.
    target = target_with_layers(folder, 1, vocab_size=3, eos_token_id=None, first_k_dense_replace=2)
    with_mtp(target)
    arguments = {"max_new_tokens": 4, "top_k": 2}
    settings = {"draft_tokens": 2, "adaptive": False}
    law, _ = speculative_law(target, PROMPT, 0, attention_mask=torch.ones_like(PROMPT), speculative=settings, **arguments)
    return total_variation(law, plain_law(target, PROMPT, 0, torch.ones_like(PROMPT), **arguments))


def test_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law is the target's; and not if a drafted token passes for one drawn from another law."""
    assert distance(tmp_path) < 1e-9
    grow = mtp.grow_chain

    def mistaken(*arguments: Any) -> Any:
        grown = grow(*arguments)
        if grown.tree.proposals is not None:
            grown.tree.proposals = grown.tree.proposals.roll(1, dims=2)
        return grown

    monkeypatch.setattr(mtp, "grow_chain", mistaken)
    assert distance(tmp_path) > 1e-3


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="says of none"):
        load_drafter("mtp", tiny("llama"))
    with pytest.raises(ValueError, match="was not loaded"):
        load_drafter("mtp", tiny("deepseek_v3", num_mtp_layers=1))
    tiny("deepseek_v3", num_mtp_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_drafter("mtp", AutoModelForCausalLM.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match="takes no argument"):
        load_drafter("mtp:2", tiny("deepseek_v3"))
