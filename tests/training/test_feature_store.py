"""Stored features train as the target itself does; a store is resumed, bounded, and refuses to be mixed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.training import Teacher, TrainingBatch, feature_store
from specheads.training.feature_store import FeatureStore, StoreDescription, batch_of_texts

from ..tiny import tiny
from .tools import batch_of, new_head, random_texts, training_of

TEXTS, PROMPTS = random_texts(7)
TOKENS = sum(map(len, TEXTS))


LENGTHS = [len(text) for text in TEXTS]


def texts_at(places: Sequence[int]) -> TrainingBatch:
    return batch_of([TEXTS[place] for place in places], [PROMPTS[place] for place in places])


def fill(store: FeatureStore, teacher: Teacher, part: tuple[int, int] = (0, 1)) -> FeatureStore:
    store.write(teacher, LENGTHS, texts_at, part)
    return store


def teacher_for(name: str) -> tuple[Teacher, Any]:
    target = tiny("llama").float()
    head = new_head(target, name)
    return Teacher(target, head.config.feature_layers), head


def store_in(folder: Path, teacher: Teacher, quota: int | None = None, **settings: Any) -> FeatureStore:
    return FeatureStore(folder, StoreDescription.of(teacher, **{"texts_per_shard": 2, **settings}), quota)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["eagle 3", "eagle 1", "medusa"])
def test_training_on_stored_features_is_training_on_the_target(name: str, precision: str, tmp_path: Path) -> None:
    teacher, head = teacher_for(name)
    store = store_in(tmp_path, teacher, precision=precision)
    fill(store, teacher)
    assert len(store) == len(TEXTS)
    training = training_of(head, teacher.target)
    online = training(batch_of(TEXTS, PROMPTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(teacher.target), "forward", None)  # the target is not run
        offline = training(batch_of_texts([FeatureStore(tmp_path)[place] for place in range(len(TEXTS))]))
    assert offline.trained == online.trained
    near = {"float16": 2e-3, "bfloat16": 2e-2}[precision]
    assert float(offline.loss_sum.detach()) == pytest.approx(float(online.loss_sum.detach()), rel=near)
    assert offline.sums.acceptance == pytest.approx(online.sums.acceptance, abs=near)


def test_the_teachers_laws_from_stored_states_are_the_models(tmp_path: Path) -> None:
    teacher, _ = teacher_for("eagle 3")
    store = store_in(tmp_path, teacher)
    fill(store, teacher)
    with torch.no_grad():
        logits = teacher.target(torch.tensor([TEXTS[4]])).logits[0]
    torch.testing.assert_close(teacher.logits(store[4]["last_hidden"]), logits, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["eagle 3", "medusa"])
def test_the_estimate_is_right_and_bounded(name: str, tmp_path: Path) -> None:
    teacher, _ = teacher_for(name)
    store = store_in(tmp_path, teacher)
    assert f"{TOKENS} tokens take 0.00 GiB" in store.check_estimate(TOKENS)
    fill(store, teacher)
    values = sum(value.nbytes for place in range(7) for key, value in store[place].items() if key != "last_hidden")
    values += sum(store[place]["last_hidden"].nbytes for place in range(7)) if name == "eagle 3" else 0
    assert store.description.bytes_for(TOKENS) == values
    assert store.bytes_used < 1.5 * values  # there are names in the file, too
    store.quota = store.description.bytes_for(TOKENS) - 1
    with pytest.raises(ValueError, match="more than the quota"):
        store.check_estimate(TOKENS)


def test_writing_goes_on_where_it_broke_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, _ = teacher_for("eagle 3")
    whole = fill(store_in(tmp_path / "whole", teacher), teacher)
    asked: list[list[int]] = []

    def breaks(places: Sequence[int]) -> TrainingBatch:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(sorted(places))
        return texts_at(places)

    with pytest.raises(KeyboardInterrupt):
        store_in(tmp_path / "parts", teacher).write(teacher, LENGTHS, breaks)
    assert asked == [[0, 1], [2, 3]]
    again = store_in(tmp_path / "parts", teacher)
    assert len(again) == 4
    again.write(teacher, LENGTHS, lambda places: asked.append(sorted(places)) or texts_at(places))
    assert asked[2:] == [[4, 5], [6]]  # what was there is not computed anew
    same_texts(again, whole)
    assert not [file for file in (tmp_path / "parts").iterdir() if file.name.startswith(".")]


def test_processes_share_the_writing(tmp_path: Path) -> None:
    teacher, _ = teacher_for("eagle 3")
    whole = fill(store_in(tmp_path / "whole", teacher), teacher)
    first = fill(store_in(tmp_path / "shared", teacher), teacher, (0, 2))
    assert [first[place]["input_ids"].tolist() for place in range(len(first))] == [TEXTS[place] for place in (0, 1, 4, 5)]
    same_texts(fill(store_in(tmp_path / "shared", teacher), teacher, (1, 2)), whole)


def test_texts_of_like_length_are_run_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, _ = teacher_for("eagle 3")
    monkeypatch.setattr(feature_store, "TOKENS_PER_BATCH", 3 * max(LENGTHS))
    store, asked = store_in(tmp_path / "sorted", teacher, texts_per_shard=7), []
    store.write(teacher, LENGTHS, lambda places: asked.append(list(places)) or texts_at(places))
    lengths = [[LENGTHS[place] for place in places] for places in asked]
    assert [length for batch in lengths for length in batch] == sorted(LENGTHS, reverse=True) and len(lengths) > 1
    assert all(max(batch) * len(batch) <= 3 * max(LENGTHS) for batch in lengths)
    same_texts(store, fill(store_in(tmp_path / "one by one", teacher, texts_per_shard=1), teacher))


def test_a_store_of_mixed_precision_is_near_and_not_mixed_up(tmp_path: Path) -> None:
    teacher, _ = teacher_for("eagle 3")
    whole = fill(store_in(tmp_path / "whole", teacher), teacher)
    mixed = fill(store_in(tmp_path / "mixed", teacher, mixed_precision="bf16"), teacher)
    assert not torch.equal(mixed[3]["features"], whole[3]["features"])
    same_texts(mixed, whole, near=0.5)
    with pytest.raises(ValueError, match="another mixed_precision"):
        store_in(tmp_path / "mixed", teacher)


def same_texts(one: FeatureStore, other: FeatureStore, near: float = 2e-3) -> None:
    """Batches differ, and so does rounding."""
    assert len(one) == len(other) == len(TEXTS)
    for place in range(len(TEXTS)):
        assert one[place]["input_ids"].tolist() == TEXTS[place]
        for name, value in other[place].items():
            torch.testing.assert_close(one[place][name], value, atol=near, rtol=near)


def test_a_crash_while_writing_leaves_no_half_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, _ = teacher_for("eagle 3")
    store = store_in(tmp_path, teacher)

    def crash(file: Path, weights: Any) -> None:
        file.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(feature_store, "write_weights", crash)
    with pytest.raises(OSError, match="disk is full"):
        fill(store, teacher)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["store.json"]
    assert len(FeatureStore(tmp_path)) == 0


def test_the_quota_holds(tmp_path: Path) -> None:
    teacher, _ = teacher_for("eagle 3")
    quota = StoreDescription.of(teacher).bytes_for(TOKENS) // 2
    store = store_in(tmp_path, teacher, quota)
    with pytest.raises(ValueError, match=r"reached its quota of .* can be trained on"):
        fill(store, teacher)
    assert 0 < store.bytes_used <= quota * 1.2
    assert len(FeatureStore(tmp_path)) > 0


@pytest.mark.filterwarnings("ignore:The head was made for")
def test_texts_whose_states_do_not_fit_the_precision_are_left_out(tmp_path: Path) -> None:
    teacher, head = teacher_for("medusa")
    teacher.most_bad = 0.1
    store = store_in(tmp_path, teacher)
    largest = teacher(batch_of(TEXTS, PROMPTS)).last_hidden.abs().amax(dim=(1, 2))
    with torch.no_grad():
        teacher.target.model.norm.weight.mul_(65504 / float(largest.median()) * 0.999)  # half of them fit
    fit = [place for place, most in enumerate(largest.tolist()) if most <= float(largest.median())]
    assert 0 < len(fit) < 7
    fill(store, teacher)
    assert [store[place]["input_ids"].tolist() for place in range(len(store))] == [TEXTS[place] for place in fit]
    assert teacher.rows_skipped == 7 - len(fit)
    assert bool(training_of(head, teacher.target)(batch_of_texts([store[0]])).loss_sum.isfinite())
    teacher.most_bad = 0.01
    with pytest.raises(FloatingPointError, match="not finite"):
        fill(store_in(tmp_path / "again", teacher), teacher)
    wider = store_in(tmp_path / "wider", teacher, precision="bfloat16")
    teacher.most_bad = 0.1
    fill(wider, teacher)
    assert len(wider) == 7


def test_stores_are_not_mixed(tmp_path: Path) -> None:
    teacher, _ = teacher_for("eagle 3")
    store_in(tmp_path, teacher, data="one")
    with pytest.raises(ValueError, match="written with another precision, data"):
        store_in(tmp_path, teacher, data="two", precision="bfloat16")
    with pytest.raises(ValueError, match="There is no feature store"):
        FeatureStore(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        store_in(tmp_path, teacher, precision="float32")
