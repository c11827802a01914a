"""Attention heads that start as copiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.evaluation.prompts import InputError
from specheads.heads import EagleHead
from specheads.training import Teacher, TrainingBatch, copying
from specheads.training.arguments import HeadArguments
from specheads.training.copying import start_copying
from specheads.training.data import Collator
from specheads.training.heads_command import _copying_groups
from tests.tiny import tiny

from .runs import flags, run, write_chats
from .templates import tokenizer_for

HALF = 24


def _target(**changes: Any) -> Any:
    shape = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 160}
    return tiny("llama", **{**shape, **changes}).float().requires_grad_(False)


def _texts(rows: int, seed: int) -> TrainingBatch:
    """Random tokens, and the same ones again."""
    half = torch.randint(3, 160, (rows, HALF), generator=torch.Generator().manual_seed(seed))
    texts = torch.cat([half, half], dim=1).tolist()
    return TrainingBatch(**Collator(0)([{"input_ids": text, "loss_mask": [True] * len(text)} for text in texts]))


def _logits(head: EagleHead, teacher: Teacher, texts: TrainingBatch) -> Tensor:
    with torch.no_grad():
        return head(texts.input_ids[:, 1:], head.fuse(teacher(texts).features[:, :-1])).logits


def _copied(head: EagleHead, teacher: Teacher) -> float:
    """How often the head's first guess is what the text has, where that is written a second time."""
    texts = _texts(8, seed=1)
    guesses = _logits(head, teacher, texts).argmax(-1)[:, HALF:-1]
    ids = head.draft_ids
    guesses = guesses if ids is None else ids[guesses]
    return float((guesses == texts.input_ids[:, HALF + 2 :]).float().mean())


def _fresh(target: Any, **fields: Any) -> tuple[EagleHead, Teacher]:
    head = EagleHead.from_target(target, **fields)
    return head, Teacher(target, head.config.feature_layers)


@pytest.mark.parametrize(("draft_tokens", "least"), [(None, 0.3), (range(0, 160, 2), 0.15)])
def test_new_heads_copy(draft_tokens: Any, least: float) -> None:
    head, teacher = _fresh(_target(), draft_tokens=draft_tokens)
    assert _copied(head, teacher) < 0.05
    start_copying(head, teacher, [_texts(64, seed=0)], 3)
    assert _copied(head, teacher) > least


def test_keys_of_other_tokens_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*arguments: Any) -> copying.Places:
        places = of(*arguments)
        places.tokens = places.tokens.roll(1, dims=0)
        return places

    of = copying.Places.of
    monkeypatch.setattr(copying.Places, "of", shifted)
    head, teacher = _fresh(_target())
    start_copying(head, teacher, [_texts(64, seed=0)], 3)
    assert _copied(head, teacher) < 0.05


def test_the_other_heads_stay() -> None:
    head, teacher = _fresh(_target())
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    start_copying(head, teacher, [_texts(8, seed=0)], 1)
    changed = {name for name, weight in head.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    attention = head.layers[0].self_attn
    assert torch.equal(attention.k_proj.weight[:-64], before["layers.0.self_attn.k_proj.weight"][:-64])
    assert torch.equal(attention.q_proj.weight[:-64], before["layers.0.self_attn.q_proj.weight"][:-64])
    assert torch.equal(attention.o_proj.weight[:, :-64], before["layers.0.self_attn.o_proj.weight"][:, :-64])


@pytest.mark.parametrize("fields", [{"version": 1}, {"transformer_layer_config": {"num_hidden_layers": 2}}])
def test_other_heads_are_refused(fields: dict[str, Any]) -> None:
    head, teacher = _fresh(_target(), **fields)
    with pytest.raises(InputError, match="EAGLE-3 heads of one layer"):
        start_copying(head, teacher, [_texts(2, seed=0)], 1)


def test_more_than_there_are_is_refused() -> None:
    head, teacher = _fresh(_target())
    with pytest.raises(InputError, match="has 4 key heads; set `copying_groups` to that at most, got 5"):
        start_copying(head, teacher, [_texts(2, seed=0)], 5)


def test_quick_rotary_positions_are_refused() -> None:
    head, teacher = _fresh(_target(head_dim=8, num_attention_heads=4))
    with pytest.raises(InputError, match="turn all dimensions within 300 tokens"):
        start_copying(head, teacher, [_texts(2, seed=0)], 1)


def test_no_text_is_refused() -> None:
    head, teacher = _fresh(_target())
    with pytest.raises(InputError, match="no text to fit copying heads to"):
        start_copying(head, teacher, [], 1)


def test_the_command_starts_them(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    _target(vocab_size=len(tokenizer_for("chatml"))).save_pretrained(tmp_path / "target")
    tokenizer_for("chatml").save_pretrained(tmp_path / "target")
    starts = []
    for name, groups in (("plain", "0"), ("copying", "2")):
        trainer = run(
            flags(tmp_path / "target", chats, tmp_path / name, "max_steps", "1", "learning_rate", "0", "copying_groups", groups)
        )
        starts.append(trainer.head.layers[0].self_attn.o_proj.weight)
    assert (
        torch.equal(starts[0][:, :128], starts[1][:, :128]) and not torch.isclose(starts[0][:, 128:], starts[1][:, 128:]).any()
    )


def test_the_command_starts_one_of_several_unless_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many, single = (_fresh(_target(num_key_value_heads=count))[0] for count in (4, 1))
    assert _copying_groups(HeadArguments(""), many) == 1
    assert _copying_groups(HeadArguments(""), single) == 0
    assert _copying_groups(HeadArguments("", copying_groups=0), many) == 0
    assert _copying_groups(HeadArguments("", warm_start=False), many) == 0
    with caplog.at_level("INFO"):
        assert _copying_groups(HeadArguments(""), _fresh(_target(head_dim=8))[0]) == 0
    assert "turn all dimensions" in caplog.text


def test_the_command_refuses_them_for_other_heads(target_folder: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    with pytest.raises(InputError, match="0 but for EAGLE-3 heads, got 1"):
        run(flags(target_folder, chats, tmp_path / "head", "copying_groups", "1", "head", "medusa"))


def test_the_command_refuses_them_for_trained_heads(target_folder: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    with pytest.raises(InputError, match="how a fresh head starts"):
        run(flags(target_folder, chats, tmp_path / "head", "copying_groups", "1", "head_name_or_path", "trained"))
