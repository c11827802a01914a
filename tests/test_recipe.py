"""A head's repository carries `custom_generate/generate.py`: speculative decoding without an import of ours, and exact."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

import specheads
from specheads import compat, loop, recipe
from specheads.heads import EagleHead
from specheads.tree import NO_TOKEN, DraftTree
from specheads.verify import Verdict
from tests.heads import perfect
from tests.hub import Hub, cut_off
from tests.tiny import tiny

IDS = torch.tensor([[3, 17, 5, 30], [8, 21, 12, 3]])
CALL = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 11, "do_sample": False}
RECIPE: dict[str, Any] = {"custom_generate": "someone/head", "trust_remote_code": True}
SETTINGS = {"adaptive": False, "draft_tokens": 4}
TOKEN = "secret"


@pytest.fixture
def target() -> Any:
    return perfect.cyclic_target()


@pytest.fixture
def head(target: Any, hub: Hub) -> Any:
    """One that is right whenever it speaks, in a repository."""
    made = perfect.perfect_eagle(target, 3)
    made.push_to_hub("someone/head", token=TOKEN, with_custom_generate=True)
    return made


def test_greedy_text_is_that_of_plain_generate_in_fewer_passes(head: Any, target: Any) -> None:
    plain = target.generate(IDS, **CALL)
    out = target.generate(IDS, **CALL, **RECIPE, return_dict_in_generate=True, speculative=SETTINGS)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.num_accepted_draft_tokens > out.speculation.num_spec_steps
    assert torch.equal(target.generate(IDS, **CALL, **RECIPE), plain)


def test_a_head_that_is_wrong_costs_nothing_but_passes(target: Any, hub: Hub) -> None:
    perfect.perfect_eagle(target, 3, late=1).push_to_hub("someone/head", token=TOKEN, with_custom_generate=True)
    out = target.generate(IDS, **CALL, **RECIPE, return_dict_in_generate=True, speculative=SETTINGS)
    assert torch.equal(out.sequences, target.generate(IDS, **CALL))
    assert out.speculation.num_draft_tokens > out.speculation.num_accepted_draft_tokens  # copies may hold


def test_a_verifier_that_takes_every_draft_is_caught(target: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    perfect.perfect_eagle(target, 3, late=1).push_to_hub("someone/head", token=TOKEN, with_custom_generate=True)
    plain, stock = target.generate(IDS, **CALL), loop.match

    def takes_all(tree: DraftTree, *arguments: Any) -> Verdict:
        verdict = stock(tree, *arguments)
        drafted = [[token for token in line if token != NO_TOKEN] for line in tree.tokens.tolist()]
        paths = [list(range(1, len(line) + 1)) for line in drafted]
        emitted = [[*line, its[-1]] for line, its in zip(drafted, verdict.emitted, strict=True)]
        return replace(verdict, paths=paths, emitted=emitted)

    monkeypatch.setattr(loop, "match", takes_all)
    assert not torch.equal(target.generate(IDS, **CALL, **RECIPE, speculative=SETTINGS), plain)


class Streamer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class Tokenizer:
    """As much of one as stop strings need: each token is a letter."""

    def get_vocab(self) -> dict[str, int]:
        return {chr(ord("a") + token): token for token in range(32)}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(sign) - ord("a") for sign in text]}


def test_what_a_callable_would_lose_arrives(head: Any, target: Any) -> None:
    plain, streamed = Streamer(), Streamer()
    expected = target.generate(IDS[:1], **{**CALL, "attention_mask": None}, streamer=plain)
    target.generate(IDS[:1], **{**CALL, "attention_mask": None}, **RECIPE, streamer=streamed)
    assert (streamed.tokens, streamed.ended) == (plain.tokens, True) == (expected[0].tolist(), plain.ended)
    asked: list[int] = []

    def stops(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
        asked.append(ids.shape[1])
        return torch.full((len(ids),), ids.shape[1] >= 9)

    for call in (RECIPE, {}):
        text = target.generate(IDS, **CALL, **call, stopping_criteria=StoppingCriteriaList([stops]))
        assert text.shape[1] == 9, call
    allowed = target.generate(IDS, **CALL, prefix_allowed_tokens_fn=lambda *_: [3, 4])
    assert torch.equal(target.generate(IDS, **CALL, **RECIPE, prefix_allowed_tokens_fn=lambda *_: [3, 4]), allowed)


def test_the_tokenizer_arrives(head: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    stock = specheads.SpeculativeGenerationMixin._make_plan
    monkeypatch.setattr(
        specheads.SpeculativeGenerationMixin,
        "_make_plan",
        lambda self, *a: seen.append(a[2].get("tokenizer")) or stock(self, *a),
    )
    tokenizer = Tokenizer()
    target.generate(IDS, **CALL, **RECIPE, tokenizer=tokenizer)
    assert seen == [tokenizer]


def test_another_draft_model_is_refused(head: Any, target: Any) -> None:
    with pytest.raises(ValueError, match="someone/head; leave out assistant_model"):
        target.generate(IDS, **CALL, **RECIPE, assistant_model=tiny())
    with pytest.raises(ValueError, match="leave out assistant_tokenizer"):
        target.generate(IDS, **CALL, **RECIPE, assistant_tokenizer=Tokenizer())


def test_an_enabled_model_keeps_its_drafter(head: Any, target: Any) -> None:
    plain = target.generate(IDS, **CALL)
    specheads.enable(target, drafter="suffix", draft_tokens=2)
    attached = target._speculation.drafter
    out = target.generate(IDS, **CALL, **RECIPE, return_dict_in_generate=True, speculative=SETTINGS)
    assert torch.equal(out.sequences, plain) and out.speculation.num_accepted_draft_tokens > 0
    assert target._speculation.drafter is attached
    assert torch.equal(target.generate(IDS, **CALL, **RECIPE, speculative=False), plain)
    with pytest.raises(ValueError, match="leave out assistant_model"):
        target.generate(IDS, **CALL, **RECIPE, assistant_model=tiny())
    target.generation_config.speculative = True
    assert torch.equal(target.generate(IDS, **CALL, **RECIPE), plain)


def test_trust_is_asked_for(head: Any, target: Any) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        target.generate(IDS, **CALL, custom_generate="someone/head", trust_remote_code=False)


def test_arguments_reach_every_download(target: Any, hub: Hub, tmp_path: Path) -> None:
    right, wrong = perfect.perfect_eagle(target, 3), perfect.perfect_eagle(target, 3, late=1)
    right.push_to_hub("someone/head", token=TOKEN, private=True, revision="v1", with_custom_generate=True)
    wrong.push_to_hub("someone/head", token=TOKEN)
    hub.requests.clear()
    download = {"revision": "v1", "token": TOKEN, "cache_dir": str(tmp_path / "own")}
    call: dict[str, Any] = {**CALL, **RECIPE, **download, "return_dict_in_generate": True, "speculative": SETTINGS}
    first = target.generate(IDS, **call)
    assert first.speculation.draft_acceptance_rate > 0.8
    assert {request.token for request in hub.requests} == {TOKEN}
    assert {request.revision for request in hub.requests} <= {"v1", hub.repositories["someone/head"].refs["v1"]}
    hub.requests.clear()
    recipe._HEADS.clear()
    again = target.generate(IDS, **{**call, "local_files_only": True, "token": None})
    assert torch.equal(again.sequences, first.sequences) and hub.requests == []


def test_weights_are_read_once_for_a_model(head: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    stock = recipe.import_head
    monkeypatch.setattr(recipe, "import_head", lambda name, model, **rest: read.append(model) or stock(name, model, **rest))
    other = perfect.cyclic_target()
    for model in (target, target, other, target):
        model.generate(IDS, **CALL, **RECIPE)
    assert read == [target, other]
    target.generate(IDS, **CALL, **RECIPE, force_download=True)
    target.generate(IDS, **CALL, **RECIPE, revision="main")
    assert read == [target, other, target, target]


def test_once_loaded_no_network_is_needed(head: Any, target: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = target.generate(IDS, **CALL, **RECIPE)
    cut_off(monkeypatch)
    recipe._HEADS.clear()
    hub.requests.clear()
    assert torch.equal(perfect.cyclic_target().generate(IDS, **CALL, **RECIPE), first)
    assert hub.requests == []


def test_a_folder_serves_as_well(target: Any, tmp_path: Path, hub: Hub) -> None:
    perfect.perfect_eagle(target, 3).save_pretrained(tmp_path / "head", with_custom_generate=True)
    call = {**RECIPE, "custom_generate": str(tmp_path / "head")}
    out = target.generate(IDS, **CALL, **call, return_dict_in_generate=True, speculative=SETTINGS)
    assert torch.equal(out.sequences, target.generate(IDS, **CALL)) and out.speculation.draft_acceptance_rate > 0.8
    assert hub.requests == []


def test_a_repository_that_is_not_named_is_an_error(target: Any) -> None:
    assert compat.repository_of_recipe() is None
    with pytest.raises(ValueError, match="name it in the call"):
        recipe.generate_with_head(target, {"inputs": IDS})


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from specheads.heads.custom_generate import generate

    monkeypatch.setitem(sys.modules, "specheads.recipe", None)
    with pytest.raises(ImportError, match="pip install -U specheads"):
        generate(model=None)


SCRIPT = """
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("someone/target", token="secret")
ids = torch.tensor([[3, 17, 5, 30]])
plain = model.generate(ids, max_new_tokens=11, do_sample=False)
out = model.generate(
    ids, max_new_tokens=11, do_sample=False, custom_generate="someone/head", trust_remote_code=True, token="secret",
    return_dict_in_generate=True, speculative={"adaptive": False},
)
assert torch.equal(out.sequences, plain), (out.sequences, plain)
print(out.speculation.num_accepted_draft_tokens)
"""


def test_a_script_that_does_not_import_the_package(target: Any, hub: Hub, tmp_path: Path) -> None:
    target.float().push_to_hub("someone/target", token=TOKEN, private=True)
    perfect.perfect_eagle(target, 3).push_to_hub("someone/head", token=TOKEN, private=True, with_custom_generate=True)
    package = Path(specheads.__file__).parent.parent
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    environment = {**os.environ, **settings, "PYTHONPATH": str(package)}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout.split()[-1]) > 0


def test_a_head_in_a_subfolder(target: Any, hub: Hub, tmp_path: Path) -> None:
    right, wrong = perfect.perfect_eagle(target, 3), EagleHead.from_target(target)
    right.save_pretrained(tmp_path / "right")
    wrong.save_pretrained(tmp_path / "wrong", with_custom_generate=True)
    hub.put("someone/head", tmp_path / "right", under="inner/")
    hub.put("someone/head", tmp_path / "wrong")
    out = target.generate(IDS, **CALL, **RECIPE, subfolder="inner", return_dict_in_generate=True, speculative=SETTINGS)
    assert out.speculation.draft_acceptance_rate > 0.8
