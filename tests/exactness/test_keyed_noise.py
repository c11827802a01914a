"""Keyed noise: the sampled text is a function of the seed, not of the drafter, the batch or the draft's shape."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

import specheads
from specheads.randomness import KeyedNoise, noise_for

from ..tiny import perturbed, tiny
from .test_greedy import prompt

TOKENS = 24


def _settings(drafter: str, seed: object = 7) -> dict:
    settings = {"sampling_noise": "keyed", "seed": seed, "draft_tokens": 4, "adaptive": False}
    if not drafter.startswith("draft"):
        settings["drafter"] = drafter
    if drafter != "draft chain":
        settings["tree_nodes"] = 9
    return settings


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "t5"])
def test_the_text_does_not_depend_on_the_drafter(family: str) -> None:
    target = specheads.enable(tiny(family))
    draft = perturbed(target, 0.05)
    inputs = prompt(family, 4)
    texts, accepted = {}, {}
    for drafter in ("none", "suffix", "recycling", "auto", "draft chain", "draft tree"):
        assistant = draft if drafter.startswith("draft") else None
        out = target.generate(
            **inputs, do_sample=True, max_new_tokens=TOKENS, temperature=0.8, speculative=_settings(drafter),
            assistant_model=assistant, return_dict_in_generate=True,
        )  # fmt: skip
        texts[drafter], accepted[drafter] = out.sequences, out.speculation.num_accepted_draft_tokens
    assert all(torch.equal(text, texts["none"]) for text in texts.values())
    assert accepted["draft chain"] > 0 and accepted["draft tree"] > 0
    # A draft that draws with the same key agrees more often than a chance of one in the vocabulary.
    assert accepted["draft chain"] > 10


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    target = specheads.enable(tiny())
    inputs = prompt("llama", 4)
    seeds = [11, 12, 13, 14]
    together = target.generate(**inputs, do_sample=True, max_new_tokens=TOKENS, speculative=_settings("auto", seeds))
    for row in range(4):
        one = {name: value[row : row + 1] for name, value in inputs.items()}
        alone = target.generate(**one, do_sample=True, max_new_tokens=TOKENS, speculative=_settings("none", [seeds[row]]))
        assert together[row][: alone.shape[1]].tolist() == alone[0].tolist()


def test_seeds_matter() -> None:
    target = specheads.enable(tiny())
    inputs = prompt("llama", 2)
    draws = [
        target.generate(**inputs, do_sample=True, max_new_tokens=12, speculative=_settings("none", seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert draws[0].shape != draws[2].shape or not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("noise", ["generator", "keyed"])
def test_draws_follow_the_weights(noise: str) -> None:
    law = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    config = specheads.SpeculativeConfig(seed=3, sampling_noise=noise)
    source = noise_for(config, 1)
    count = 20_000
    drawn = torch.cat([source.draw(law.expand(100, -1), [0] * 100, range(i, i + 100)) for i in range(0, count, 100)])
    counts = torch.bincount(drawn, minlength=5)
    assert counts[1] == 0
    kept = law > 0
    assert stats.chisquare(counts[kept].numpy(), (law[kept] * count).numpy()).pvalue > 1e-4


def test_keys_are_independent_over_positions_rows_and_seeds() -> None:
    law = torch.full((1, 2), 0.5)
    noise = KeyedNoise([(0, row) for row in range(2)])
    other = KeyedNoise([(1, row) for row in range(2)])
    streams = [
        [int(source.draw(law, [row], [position])) for position in range(4000)] for source in (noise, other) for row in range(2)
    ]
    for i in range(4):
        assert 0.46 < sum(streams[i]) / 4000 < 0.54
        for j in range(i):
            agreement = sum(a == b for a, b in zip(streams[i], streams[j], strict=True)) / 4000
            assert 0.46 < agreement < 0.54
