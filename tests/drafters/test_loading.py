"""A drafter from a head: a module, a folder in any known layout, or a name that says what it may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import specheads
from specheads import EagleHead, MedusaHeads, SpeculationStats
from specheads.drafters.eagle import EagleDrafter
from specheads.drafters.head import weights_per_pass
from specheads.drafters.medusa import MedusaDrafter
from specheads.heads.target_parts import EXPERTS, first_of

from ..heads import perfect
from ..tiny import tiny

IDS = torch.tensor([[3, 17, 5, 30]])
SETTINGS = {"adaptive": False, "draft_tokens": 4}


def says(target: PreTrainedModel, **arguments: Any) -> tuple[list[int], SpeculationStats]:
    arguments = {"speculative": SETTINGS, **arguments}
    out = target.generate(
        IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=11, return_dict_in_generate=True, **arguments
    )
    return out.sequences[0].tolist(), out.speculation


def heads() -> dict[str, Any]:
    target = perfect.cyclic_target()
    return {
        "eagle 1": (target, perfect.perfect_eagle(target, 1), EagleDrafter),
        "eagle 3": (target, perfect.perfect_eagle(target, 3, draft_tokens=perfect.CYCLE), EagleDrafter),
        "medusa": (target, perfect.perfect_medusa(target, num_heads=4), MedusaDrafter),
    }


@pytest.mark.parametrize("name", ["eagle 1", "eagle 3", "medusa"])
def test_a_folder_drafts_as_the_head_does(name: str, tmp_path: Path) -> None:
    target, head, kind = heads()[name]
    specheads.enable(target, drafter=head)
    text, stats = says(target)
    assert stats.acceptance_histogram == [1, 0, 0, 0, 2]
    head.save_pretrained(tmp_path)
    for folder in (str(tmp_path), tmp_path):
        specheads.enable(target, drafter=folder)
        assert isinstance(target._speculation.drafter.source, kind)
        assert says(target)[0] == text
        assert says(target)[1].acceptance_histogram == [1, 0, 0, 0, 2]
    specheads.enable(target)
    assert says(target, speculative={**SETTINGS, "drafter": str(tmp_path)})[1].acceptance_histogram == [1, 0, 0, 0, 2]
    assert says(target, assistant_model=head)[1].acceptance_histogram == [1, 0, 0, 0, 2]


@pytest.mark.parametrize(("name", "layout"), [("eagle 1", "eagle"), ("eagle 3", "eagle3"), ("medusa", "medusa")])
def test_other_layouts(name: str, layout: str, tmp_path: Path) -> None:
    target, head, _ = heads()[name]
    specheads.export_head(head, tmp_path, format=layout)
    specheads.enable(target, drafter=str(tmp_path))
    assert says(target)[1].acceptance_histogram == [1, 0, 0, 0, 2]


def test_options_reach_the_loading(tmp_path: Path) -> None:
    target = tiny("llama")
    head = EagleHead.from_target(target)
    head.save_pretrained(tmp_path / "inner")
    drafter = specheads.load_drafter(str(tmp_path), target, subfolder="inner")
    assert isinstance(drafter.source, EagleDrafter)
    with pytest.raises(OSError, match="nobody/nothing"):
        specheads.load_drafter("nobody/nothing", target, local_files_only=True)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    target = tiny("llama")
    with pytest.raises(ValueError, match=r"Unknown drafter 'suffixes'; known are none, .*owner/name"):
        specheads.enable(target, drafter="suffixes")
    with pytest.raises(TypeError, match="revision: only a head"):
        specheads.load_drafter("suffix", target, revision="main")
    with pytest.raises(FileNotFoundError):
        specheads.enable(target, drafter=str(tmp_path))
    other = tiny("llama", hidden_size=16, num_attention_heads=2)
    for head in (EagleHead.from_target(other), MedusaHeads.from_target(other)):
        with pytest.raises(ValueError, match="does not fit"):
            specheads.enable(target, drafter=head)


def test_step_costs_are_shares_of_the_targets_weights() -> None:
    target = tiny("llama", tie_word_embeddings=False)
    table = target.get_input_embeddings().weight.numel()
    assert weights_per_pass(target) == target.num_parameters() - table
    tied = tiny("llama", tie_word_embeddings=True)
    assert weights_per_pass(tied) == tied.num_parameters()
    small = specheads.load_drafter(EagleHead.from_target(target, draft_tokens=range(4)), target)
    large = specheads.load_drafter(EagleHead.from_target(target), target)
    whole = weights_per_pass(target)
    assert large.step_cost - small.step_cost == pytest.approx(28 * 32 / whole)
    first = specheads.load_drafter(EagleHead.from_target(target, version=1), target)
    assert 0.3 < first.step_cost < 1.0
    medusa = [specheads.load_drafter(MedusaHeads.from_target(target, num_heads=n), target).step_cost for n in (2, 5)]
    assert medusa[0] == medusa[1] == pytest.approx((32 * 32 + 32 + 32 * 32) / whole)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_pass_reads_the_experts_that_a_token_goes_to(family: str) -> None:
    target = tiny(family)
    every, active = first_of(target.config, EXPERTS), target.config.num_experts_per_tok
    experts = sum(weight.numel() for name, weight in target.named_parameters() if ".experts." in name)
    table = target.get_input_embeddings().weight.numel() * (not target.config.tie_word_embeddings)
    assert every > active and experts > 0
    assert weights_per_pass(target) == target.num_parameters() - table - experts * (every - active) // every


@pytest.mark.parametrize(
    "accuracies",
    [[[0.5]], [[0.5], [], [0.5], [0.5]], [[0.5], [1.5], [0.5], [0.5]]],
)
def test_accuracies_that_are_none_are_refused(accuracies: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="head_accuracies"):
        specheads.MedusaConfig.from_target(tiny("llama"), head_accuracies=accuracies)


def test_public_names() -> None:
    for name in ("EagleConfig", "EagleHead", "MedusaConfig", "MedusaHeads", "import_head", "export_head"):
        assert name in dir(specheads) and callable(getattr(specheads, name))
