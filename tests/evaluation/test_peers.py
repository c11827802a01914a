"""Other libraries as variants. A stand-in with the parts of `economize` that are called; the real one where it is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import specheads
from specheads.evaluation.peers import EconomizeLookup, load_peer
from specheads.evaluation.prompts import InputError
from specheads.evaluation.speed import SpeedArguments, main, measure_speed
from specheads.evaluation.variants import check_batch_size, parse_speculative, parse_variants


class StandIn:
    """What `economize.apply` gives back."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lengths: list[int] = []

    def decode(self, input_ids: Tensor, max_new_tokens: int, *, decoding: Any, stop: int) -> Any:
        self.lengths.append(decoding.cycle_length)
        text = self.model.generate(input_ids[None], max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stop)
        return SimpleNamespace(tokens=text[0, len(input_ids) :])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    made: list[StandIn] = []
    root, lookup = ModuleType("economize"), ModuleType("economize.techniques.lookup")

    def apply(model: Any, config: Any) -> StandIn:
        assert not isinstance(model, specheads.SpeculativeGenerationMixin), "it is measured without this library's parts"
        made.append(StandIn(model))
        return made[-1]

    root.apply = apply  # type: ignore[attr-defined]
    root.DecodeConfig = SimpleNamespace  # type: ignore[attr-defined]
    root.EconomizeError = RuntimeError  # type: ignore[attr-defined]
    lookup.LookupConfig = SimpleNamespace  # type: ignore[attr-defined]
    techniques = ModuleType("economize.techniques")
    for module in (root, techniques, lookup):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_it_is_measured_beside_the_others(
    stand_in: list[StandIn], model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    options = SpeedArguments(
        model=str(model_folder),
        prompts=str(prompt_file),
        variant="economize-lookup:6,auto,economize-lookup",
        max_new_tokens=9,
        draft_tokens="2",
        output=tmp_path / "speed.json",
    )
    summary = measure_speed(options)["summary"]
    assert summary["economize-lookup"]["greedy"] == {"rows": 3, "divergences": []}
    assert summary["economize-lookup"]["tokens"] == summary["plain"]["tokens"] > 0
    # K drafted tokens and the target's own are a cycle.
    assert [set(peer.lengths) for peer in stand_in] == [{7}, {3}]


def test_a_wrong_text_of_it_is_seen(
    stand_in: list[StandIn], monkeypatch: pytest.MonkeyPatch, model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    decode = StandIn.decode

    def broken(self: StandIn, *arguments: Any, **named: Any) -> Any:
        result = decode(self, *arguments, **named)
        result.tokens[-1] = (result.tokens[-1] + 1) % 5
        return result

    monkeypatch.setattr(StandIn, "decode", broken)
    options = SpeedArguments(
        model=str(model_folder),
        prompts=str(prompt_file),
        variant="economize-lookup",
        max_new_tokens=9,
        output=tmp_path / "speed.json",
    )
    assert measure_speed(options)["summary"]["economize-lookup"]["greedy"]["divergences"]


def test_sampling_is_refused(
    stand_in: list[StandIn], capsys: pytest.CaptureFixture[str], model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "speed.json"
    given = [
        "--model",
        str(model_folder),
        "--prompts",
        str(prompt_file),
        "--variant",
        "economize-lookup",
        "--temperature",
        "0.7",
    ]
    assert main([*given, "--output", str(output)]) == 2
    assert "economize-lookup cannot run here: it is compared on greedy text only" in " ".join(capsys.readouterr().err.split())
    assert not output.exists()


def test_it_must_be_installed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "economize", None)
    (variant,) = (one for one in parse_variants("economize-lookup") if one.is_peer)
    with pytest.raises(InputError, match=r"variant economize-lookup cannot be measured\. It needs the library economize"):
        load_peer(variant, model, None)


def test_a_target_that_it_cannot_run(model: Any, stand_in: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise sys.modules["economize"].EconomizeError("no such layers")

    monkeypatch.setattr(sys.modules["economize"], "apply", refuse)
    with pytest.raises(InputError, match="economize cannot run this target: no such layers"):
        EconomizeLookup(model)


def test_one_prompt_at_a_time_and_for_speed_only() -> None:
    with pytest.raises(InputError, match="economize-lookup: drafts are for one prompt at a time there"):
        check_batch_size(parse_variants("economize-lookup"), 2)
    with pytest.raises(InputError, match="only drafters of this library"):
        parse_speculative("economize-lookup")


@pytest.mark.skipif(find_spec("economize") is None, reason="economize is not installed")
def test_the_library_itself(model: Any) -> None:
    prompt = torch.tensor([[1, 2, 3, 1, 2]])
    text = EconomizeLookup(model, 3).generate(prompt, max_new_tokens=12, do_sample=False).sequences
    assert torch.equal(text, model.generate(prompt, max_new_tokens=12, do_sample=False))
