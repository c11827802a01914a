"""The law of sampling with targets that take chains only, rows in step: by a state, by distance biases, by cached positions."""

from __future__ import annotations

from typing import Any

import pytest

import specheads
from specheads.replay import ReplayRunner, Snapshot

from ..tiny import perturbed, tiny
from .whole_loop import distance

SCHEMES: dict[str, dict[str, Any]] = {
    "chain-block": {"draft_tokens": 2, "verification": "block"},
    "chain-match": {"draft_tokens": 2, "verification": "match"},
}
# Scans are in single precision, whatever the model's.
TOLERANCE = {"lfm2": 1e-9, "bloom": 1e-5, "falcon_h1": 1e-4, "qwen3_next": 1e-4}


def worst(family: str, scheme: str, batch: int) -> float:
    target = tiny(family, 3, eos_token_id=None)
    if hasattr(target, "set_experts_implementation"):
        target.set_experts_implementation("eager")
    draft = perturbed(specheads.enable(target), 0.1)
    return distance(target, draft, {"adaptive": False, **SCHEMES[scheme]}, "warped", batch, 3)[0]


# Not Bloom with padding: its eager attention makes that NaN in double precision.
CASES = [(family, batch) for family in TOLERANCE for batch in (1, 2) if (family, batch) != ("bloom", 2)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("family", "batch"), CASES)
def test_chains_in_step(family: str, batch: int, scheme: str) -> None:
    assert worst(family, scheme, batch) < TOLERANCE[family]


def test_a_state_that_is_not_put_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshot, "restore", lambda self, cache: None)
    assert worst("lfm2", "chain-block", 1) > 1e-3


def test_tokens_that_are_not_fed_again_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ReplayRunner.commit

    def commit(self: ReplayRunner, kept: Any) -> None:
        original(self, kept)
        self.replayed = self.replayed[:, :0]

    monkeypatch.setattr(ReplayRunner, "commit", commit)
    assert worst("lfm2", "chain-block", 1) > 1e-3
