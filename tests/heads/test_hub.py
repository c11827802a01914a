"""Heads go to the Hub and come from it: each argument of a download reaches every request, and what fails says why.

The Hub is a stand-in on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

import specheads
from specheads.heads import DraftHead, EagleHead, MedusaHeads
from specheads.heads.provenance import describe_target
from tests.formats import checkpoints as made
from tests.hub import Hub, cut_off
from tests.tiny import perturbed, tiny

HEADS: dict[str, Callable[[PreTrainedModel], DraftHead]] = {
    "eagle 1": lambda target: EagleHead.from_target(target, version=1),
    "eagle 3": lambda target: EagleHead.from_target(target, draft_tokens=[3, 5, 9], confidence=True),
    "medusa": lambda target: MedusaHeads.from_target(target, num_heads=2),
}
TOKEN = "secret"


def drafter_of(model: Any) -> Any:
    return model._speculation.drafter


WAYS: dict[str, Callable[..., DraftHead]] = {
    "from_pretrained": lambda name, _, kind, **options: kind.from_pretrained(name, **options),
    "AutoModel": lambda name, _, kind, **options: AutoModel.from_pretrained(name, **options),
    "import_head": lambda name, target, _, **options: specheads.import_head(name, target, **options),
    "load_drafter": lambda name, target, _, **options: specheads.load_drafter(name, target, **options).source.head,
    "enable": lambda name, target, _, **options: drafter_of(specheads.enable(target, drafter=name, **options)).source.head,
}


def randomised(head: Any) -> Any:
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def same(head: Any, other: Any) -> bool:
    own, its = head.state_dict(), other.state_dict()
    return own.keys() == its.keys() and all(torch.equal(own[name], its[name]) for name in own)


def one_sentence(error: pytest.ExceptionInfo[BaseException]) -> bool:
    text = str(error.value)
    return "\n" not in text and text.endswith(".") and text.count(". ") == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HEADS)
def test_arguments_reach_every_download(name: str, way: str, hub: Hub, tmp_path: Path) -> None:
    target = tiny()
    first, second = (randomised(HEADS[name](target)) for _ in range(2))
    first.push_to_hub("someone/head", private=True, token=TOKEN, revision="v1")
    second.push_to_hub("someone/head", token=TOKEN)
    hub.requests.clear()
    arguments = {"revision": "v1", "token": TOKEN, "cache_dir": str(tmp_path / "own")}

    assert same(WAYS[way]("someone/head", target, type(first), **arguments), first)
    commit = hub.repositories["someone/head"].refs["v1"]
    assert {"config.json", "model.safetensors"} <= {request.file for request in hub.asked()}
    assert {request.token for request in hub.requests} == {TOKEN}
    assert {request.revision for request in hub.requests} <= {"v1", commit}
    assert (tmp_path / "own").exists()
    assert way == "AutoModel" or not Path(huggingface_hub.constants.HF_HUB_CACHE).exists()  # it looks there for an adapter

    hub.requests.clear()
    offline = {"revision": "v1", "cache_dir": str(tmp_path / "own"), "local_files_only": True}
    assert same(WAYS[way]("someone/head", target, type(first), **offline), first)
    assert hub.requests == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_a_subfolder(name: str, way: str, hub: Hub, tmp_path: Path) -> None:
    target = tiny()
    head, other = (randomised(HEADS[name](target)) for _ in range(2))
    head.save_pretrained(tmp_path / "head")
    other.save_pretrained(tmp_path / "other")
    hub.put("someone/heads", tmp_path / "head", under="inner/")
    hub.put("someone/heads", tmp_path / "other")
    assert same(WAYS[way]("someone/heads", target, type(head), subfolder="inner", token=TOKEN), head)
    assert {request.token for request in hub.requests} == {TOKEN}
    assert {request.file.split("/")[0] for request in hub.asked() if request.method == "GET"} == {"inner"}


@pytest.mark.parametrize("way", ["import_head", "load_drafter", "enable"])
@pytest.mark.parametrize("layout", ["eagle3", "medusa"])
def test_arguments_reach_every_download_of_a_foreign_head(layout: str, way: str, hub: Hub, tmp_path: Path) -> None:
    target, checkpoint = made.target(), getattr(made, layout)()
    file = "medusa_lm_head.safetensors" if layout == "medusa" else "model.safetensors"
    hub.put("someone/foreign", tmp_path, "main")  # empty
    commit = hub.put("someone/foreign", made.save(tmp_path / "in", *checkpoint, file), "v1", "inner/")
    hub.repositories["someone/foreign"].private = True
    arguments = {"revision": "v1", "subfolder": "inner", "cache_dir": str(tmp_path / "own")}
    head = WAYS[way]("someone/foreign", target, None, token=TOKEN, **arguments)
    assert isinstance(head, MedusaHeads if layout == "medusa" else EagleHead)
    assert {f"inner/{name}" for name in ("config.json", file)} <= {request.file for request in hub.asked()}
    assert {request.token for request in hub.requests} == {TOKEN}
    assert {request.revision for request in hub.requests} <= {"v1", commit}
    assert not Path(huggingface_hub.constants.HF_HUB_CACHE).exists()
    hub.requests.clear()
    assert same(WAYS[way]("someone/foreign", target, None, local_files_only=True, **arguments), head)
    assert hub.requests == []


def test_files_are_of_one_commit_while_others_are_pushed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    first, second = (randomised(HEADS["eagle 3"](target)) for _ in range(2))
    first.push_to_hub("someone/head", token=TOKEN)
    stock = PreTrainedModel.from_pretrained.__func__

    def with_a_push_between(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = stock(cls, *args, **kwargs)
        second.push_to_hub("someone/head", token=TOKEN)
        return loaded

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(with_a_push_between))
    assert same(EagleHead.from_pretrained("someone/head"), first)


def test_configs(hub: Hub) -> None:
    head = HEADS["eagle 3"](tiny())
    head.push_to_hub("someone/head", token=TOKEN, private=True)
    hub.requests.clear()
    config = AutoConfig.from_pretrained("someone/head", token=TOKEN)
    assert type(config) is type(head.config) and config.draft_vocab_size == 3
    assert {request.token for request in hub.requests} == {TOKEN}


@pytest.mark.parametrize("way", WAYS)
def test_once_loaded_no_network_is_needed(way: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    head = randomised(HEADS["eagle 3"](target))
    head.push_to_hub("someone/head", token=TOKEN)
    WAYS[way]("someone/head", target, EagleHead)
    cut_off(monkeypatch)
    assert same(WAYS[way]("someone/head", target, EagleHead), head)


@pytest.mark.parametrize("way", ["from_pretrained", "import_head", "load_drafter", "enable"])
def test_what_fails_says_why_in_one_sentence(way: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    head = HEADS["eagle 3"](target)
    head.push_to_hub("someone/public", token=TOKEN)
    head.push_to_hub("someone/private", token=TOKEN, private=True)
    head.push_to_hub("someone/gated", token=TOKEN)
    hub.repositories["someone/gated"].gated = True
    hub.put("someone/empty", tmp_path)

    def load(name: str, **options: Any) -> Any:
        return WAYS[way](name, target, EagleHead, **options)

    for name, options, message in [
        ("someone/missing", {}, r"no repository someone/missing that can be read without a token: check the name"),
        ("someone/private", {}, r"no repository someone/private .* for a private one pass `token=`"),
        ("someone/private", {"token": "wrong"}, r"with this token"),
        ("someone/gated", {}, r"is gated: ask for access"),
        ("someone/public", {"revision": "v9"}, r"has no revision 'v9'"),
        ("someone/public", {"local_files_only": True}, r"not in the cache, and nothing is downloaded"),
        ("someone/empty", {}, r"no config\.json in someone/empty"),
        ("someone/public", {"subfolder": "inner"}, r"no config\.json in someone/public under inner"),
    ]:
        with pytest.raises(OSError, match=message) as error:
            load(name, **options)
        assert one_sentence(error), str(error.value)
    cut_off(monkeypatch)
    with pytest.raises(OSError, match=r"someone/public cannot be loaded from http://127.*network") as error:
        load("someone/public")
    assert one_sentence(error), str(error.value)


def test_a_download_that_breaks_off_is_not_taken_for_a_file_that_is_not_there(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = HEADS["eagle 3"](tiny())
    head.push_to_hub("someone/head", token=TOKEN)
    AutoConfig.from_pretrained("someone/head")
    stock = PreTrainedModel.from_pretrained.__func__

    def then_cut_off(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = stock(cls, *args, **kwargs)
        cut_off(monkeypatch)
        return loaded

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(then_cut_off))
    with pytest.raises(OSError, match="cannot be loaded from"):
        EagleHead.from_pretrained("someone/head")


def test_options_without_a_head_are_refused() -> None:
    with pytest.raises(ValueError, match="revision: only a head"):
        specheads.enable(tiny(), revision="v1")
    with pytest.raises(TypeError, match="token: only a head"):
        specheads.enable(tiny(), drafter="suffix", token=TOKEN)
    with pytest.raises(ValueError, match=r"Unknown speculative option\(s\) draft_token;"):
        specheads.enable(tiny(), drafter="someone/head", draft_token=3, revision="v1")


def test_a_push_is_one_commit_and_replaces_the_one_before(hub: Hub) -> None:
    target = tiny()
    with pytest.raises(OSError, match="401"):
        HEADS["medusa"](target).push_to_hub("someone/head")
    head = HEADS["eagle 3"](target)
    info = head.push_to_hub("head", token=TOKEN, commit_message="First", tags=["mine"])  # the namespace is the account's
    repository = hub.repositories["someone/head"]
    assert not repository.private and info.oid == repository.refs["main"] and info.commit_message == "First"
    assert len(repository.commits) == 2  # that of the empty repository is the other one
    files = {"README.md", "config.json", "model.safetensors", "specheads/confidence.safetensors"}
    assert set(hub.files("someone/head")) == {".gitattributes", *files}
    assert "- mine" in hub.files("someone/head")["README.md"].decode()
    head.push_to_hub("someone/head", token=TOKEN, max_shard_size="20KB")
    assert "model.safetensors" not in hub.files("someone/head") and "model.safetensors.index.json" in hub.files("someone/head")
    HEADS["medusa"](target).push_to_hub("someone/head", token=TOKEN)
    assert set(hub.files("someone/head")) == {".gitattributes", "README.md", "config.json", "model.safetensors"}
    assert {request.token for request in hub.requests if request.kind != "upload"} == {None, TOKEN}
    assert all(request.token == TOKEN for request in hub.requests[2:] if request.kind != "upload")


def test_a_push_leaves_other_branches_and_what_is_not_the_heads(hub: Hub, tmp_path: Path) -> None:
    head = HEADS["eagle 3"](tiny())
    head.push_to_hub("someone/head", token=TOKEN)
    main = hub.repositories["someone/head"].refs["main"]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model-card.png").write_text("mine")
    hub.put("someone/head", tmp_path, "v2")
    randomised(head).push_to_hub("someone/head", token=TOKEN, revision="v2")
    assert hub.repositories["someone/head"].refs["main"] == main
    files = hub.files("someone/head", "v2")
    assert files["notes.txt"] == files["model-card.png"] == b"mine"
    assert same(EagleHead.from_pretrained("someone/head", revision="v2"), head)


def test_a_push_may_be_a_pull_request(hub: Hub) -> None:
    target = tiny()
    first, second = (randomised(HEADS["eagle 3"](target)) for _ in range(2))
    first.push_to_hub("someone/head", token=TOKEN)
    assert second.push_to_hub("someone/head", token=TOKEN, create_pr=True).pr_url.endswith("/discussions/1")
    assert same(EagleHead.from_pretrained("someone/head"), first)
    assert same(EagleHead.from_pretrained("someone/head", revision="refs/pr/1"), second)


def test_no_pickles_are_pushed(hub: Hub) -> None:
    for name, make in HEADS.items():
        make(tiny()).push_to_hub("someone/head", token=TOKEN, with_custom_generate=True)
        assert {Path(file).suffix for file in hub.files("someone/head")} <= {".md", ".json", ".safetensors", ".py", ""}, name


def test_unknown_arguments_of_a_push_are_refused(hub: Hub) -> None:
    with pytest.raises(TypeError, match="privat"):
        HEADS["medusa"](tiny()).push_to_hub("someone/head", privat=True)
    assert hub.requests == []


@pytest.fixture
def published(hub: Hub) -> tuple[PreTrainedModel, str, str]:
    """A target with two revisions, that of `main` and of `old`."""
    target = tiny().float()
    target.push_to_hub("someone/target", token=TOKEN)
    main = hub.repositories["someone/target"].refs["main"]
    perturbed(target, 0.1).push_to_hub("someone/target", token=TOKEN, revision="old")
    return target, main, hub.repositories["someone/target"].refs["old"]


def test_a_head_knows_the_revision_of_its_target(published: Any) -> None:
    _, main, old = published
    for revision, commit in ((None, main), ("old", old), (old, old), ("main", main)):
        loaded = AutoModelForCausalLM.from_pretrained("someone/target", revision=revision)
        assert describe_target(loaded)["revision"] == commit
        assert describe_target(loaded)["name_or_path"] == "someone/target"
    half = AutoModelForCausalLM.from_pretrained("someone/target", revision="old", dtype=torch.bfloat16)
    config = EagleHead.from_target(half).config
    assert MedusaHeads.from_target(half).config.base_model["revision"] == old
    assert config.base_model["revision"] == old
    assert describe_target(half, revision="mine")["revision"] == "mine"
    with pytest.warns(UserWarning, match=rf"someone/target \(revision {old}, .* someone/target \(revision {main}, "):
        config.check_against(AutoModelForCausalLM.from_pretrained("someone/target"))


def test_a_revision_that_is_not_known_is_not_guessed(published: Any, tmp_path: Path) -> None:
    target, _, _ = published
    assert describe_target(target)["revision"] is None
    elsewhere = AutoModelForCausalLM.from_pretrained("someone/target", revision="old", cache_dir=str(tmp_path / "own"))
    assert describe_target(elsewhere)["revision"] is None
    AutoModelForCausalLM.from_pretrained("someone/target")
    assert describe_target(elsewhere)["revision"] is None  # only that of main is there
    trained = AutoModelForCausalLM.from_pretrained("someone/target")
    with torch.no_grad():
        trained.model.layers[0].mlp.up_proj.weight[0] += 1
    assert describe_target(trained)["revision"] is None


def test_a_revision_with_the_same_weights(published: Any, hub: Hub, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained("someone/target")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "README.md").write_text("new")
    newer = hub.put("someone/target", tmp_path / "files")
    loaded = AutoModelForCausalLM.from_pretrained("someone/target")
    assert describe_target(loaded)["revision"] == newer
