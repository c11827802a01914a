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
from specheads.training.copying import add_copying_heads, widened
from specheads.training.data import Collator
from tests.tiny import tiny

from .runs import flags, run, write_chats
from .templates import tokenizer_for

HALF = 24


def _target(**changes: Any) -> Any:
    shape = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 160}
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


def test_a_wider_head_computes_what_it_did() -> None:
    head, teacher = _fresh(_target())
    wide = widened(head, 3)
    wide.bind(teacher.target)
    assert wide.config.transformer_layer_config.num_attention_heads == 8
    texts = _texts(2, seed=0)
    torch.testing.assert_close(_logits(wide, teacher, texts), _logits(head, teacher, texts))


@pytest.mark.parametrize(("draft_tokens", "least"), [(None, 0.3), (range(0, 160, 2), 0.15)])
def test_new_heads_copy(draft_tokens: Any, least: float) -> None:
    head, teacher = _fresh(_target(), draft_tokens=draft_tokens)
    assert _copied(head, teacher) < 0.05
    assert _copied(add_copying_heads(head, teacher, [_texts(64, seed=0)], 3), teacher) > least


def test_keys_of_other_tokens_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*arguments: Any) -> copying.Places:
        places = of(*arguments)
        places.tokens = places.tokens.roll(1, dims=0)
        return places

    of = copying.Places.of
    monkeypatch.setattr(copying.Places, "of", shifted)
    head, teacher = _fresh(_target())
    assert _copied(add_copying_heads(head, teacher, [_texts(64, seed=0)], 3), teacher) < 0.05


def test_what_the_head_was_stays() -> None:
    head, teacher = _fresh(_target())
    wide = add_copying_heads(head, teacher, [_texts(8, seed=0)], 1)
    for name, weight in head.named_parameters():
        kept = dict(wide.named_parameters())[name][tuple(slice(size) for size in weight.shape)]
        assert torch.equal(kept, weight), name


@pytest.mark.parametrize("fields", [{"version": 1}, {"transformer_layer_config": {"num_hidden_layers": 2}}])
def test_other_heads_are_refused(fields: dict[str, Any]) -> None:
    head, teacher = _fresh(_target(), **fields)
    with pytest.raises(InputError, match="EAGLE-3 heads of one layer"):
        add_copying_heads(head, teacher, [_texts(2, seed=0)], 1)


def test_a_number_of_heads_that_stock_layers_lack_is_refused() -> None:
    head, teacher = _fresh(_target())
    with pytest.raises(InputError, match=r"6 attention heads, of which its hidden size .128. .* to 1 or 3 or 7"):
        add_copying_heads(head, teacher, [_texts(2, seed=0)], 2)


def test_quick_rotary_positions_are_refused() -> None:
    head, teacher = _fresh(_target(head_dim=8, num_attention_heads=4))
    with pytest.raises(InputError, match="turn all dimensions within 300 tokens"):
        add_copying_heads(head, teacher, [_texts(2, seed=0)], 1)


def test_no_text_is_refused() -> None:
    head, teacher = _fresh(_target())
    with pytest.raises(InputError, match="no text to fit copying heads to"):
        add_copying_heads(head, teacher, [], 1)


def test_the_command_adds_them(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    _target(vocab_size=len(tokenizer_for("chatml"))).save_pretrained(tmp_path / "target")
    tokenizer_for("chatml").save_pretrained(tmp_path / "target")
    trainer = run(flags(tmp_path / "target", chats, tmp_path / "head", "max_steps", "2", "copying_groups", "3"))
    layer = EagleHead.from_pretrained(tmp_path / "head").config.transformer_layer_config
    assert (layer.num_attention_heads, layer.num_key_value_heads) == (8, 4)
    assert trainer.head.layers[0].self_attn.o_proj.weight.shape == (128, 8 * 64)


def test_the_command_refuses_them_for_other_heads(target_folder: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    with pytest.raises(InputError, match="0 but for EAGLE-3 heads, got 1"):
        run(flags(target_folder, chats, tmp_path / "head", "copying_groups", "1", "head", "medusa"))
