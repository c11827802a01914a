"""Stored features train as the target itself does; a store is resumed, bounded, and refuses to be mixed."""

from __future__ import annotations

from collections.abc import Iterator
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


def batches(sizes: tuple[int, ...] = (3, 3, 1)) -> Iterator[TrainingBatch]:
    start = 0
    for size in sizes:
        yield batch_of(TEXTS[start : start + size], PROMPTS[start : start + size])
        start += size


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
    store.write(teacher, batches())
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
    store.write(teacher, batches())
    with torch.no_grad():
        logits = teacher.target(torch.tensor([TEXTS[4]])).logits[0]
    torch.testing.assert_close(teacher.logits(store[4]["last_hidden"]), logits, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["eagle 3", "medusa"])
def test_the_estimate_is_right_and_bounded(name: str, tmp_path: Path) -> None:
    teacher, _ = teacher_for(name)
    store = store_in(tmp_path, teacher)
    assert f"{TOKENS} tokens take 0.00 GiB" in store.check_estimate(TOKENS)
    store.write(teacher, batches())
    values = sum(value.nbytes for place in range(7) for key, value in store[place].items() if key != "last_hidden")
    values += sum(store[place]["last_hidden"].nbytes for place in range(7)) if name == "eagle 3" else 0
    assert store.description.bytes_for(TOKENS) == values
    assert store.bytes_used < 1.5 * values  # there are names in the file, too
    store.quota = store.description.bytes_for(TOKENS) - 1
    with pytest.raises(ValueError, match="more than the quota"):
        store.check_estimate(TOKENS)


def test_writing_goes_on_where_it_broke_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, _ = teacher_for("eagle 3")
    whole = store_in(tmp_path / "whole", teacher)
    whole.write(teacher, batches())

    def broken() -> Iterator[TrainingBatch]:
        for index, batch in enumerate(batches((2, 3, 2))):
            if index == 2:
                raise KeyboardInterrupt
            yield batch

    with pytest.raises(KeyboardInterrupt):
        store_in(tmp_path / "parts", teacher).write(teacher, broken())
    again = store_in(tmp_path / "parts", teacher)
    assert again.texts_done == len(again) == 4
    runs: list[int] = []
    original = Teacher.__call__

    def counted(own: Teacher, batch: TrainingBatch, *arguments: Any) -> Any:
        runs.append(len(batch.input_ids))
        return original(own, batch, *arguments)

    monkeypatch.setattr(Teacher, "__call__", counted)
    again.write(teacher, batches())
    assert runs == [3, 1]  # the batch that holds texts 3 to 5, and the last
    assert len(again) == len(whole) == 7
    for place in range(7):
        for name, value in whole[place].items():
            torch.testing.assert_close(again[place][name], value, atol=2e-3, rtol=2e-3)  # batches differ
    assert not [file for file in (tmp_path / "parts").iterdir() if file.name.startswith(".")]


def test_a_crash_while_writing_leaves_no_half_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, _ = teacher_for("eagle 3")
    store = store_in(tmp_path, teacher)

    def crash(file: Path, weights: Any) -> None:
        file.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(feature_store, "write_weights", crash)
    with pytest.raises(OSError, match="disk is full"):
        store.write(teacher, batches())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["store.json"]
    assert len(FeatureStore(tmp_path)) == 0


def test_the_quota_holds(tmp_path: Path) -> None:
    teacher, _ = teacher_for("eagle 3")
    quota = StoreDescription.of(teacher).bytes_for(TOKENS) // 2
    store = store_in(tmp_path, teacher, quota)
    with pytest.raises(ValueError, match=r"reached its quota of .* can be trained on"):
        store.write(teacher, batches())
    assert 0 < store.bytes_used <= quota * 1.2
    assert len(FeatureStore(tmp_path)) == store.texts_done > 0


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
    store.write(teacher, batches())
    assert [store[place]["input_ids"].tolist() for place in range(len(store))] == [TEXTS[place] for place in fit]
    assert store.texts_done == 8 and teacher.rows_skipped == 7 - len(fit)
    assert bool(training_of(head, teacher.target)(batch_of_texts([store[0]])).loss_sum.isfinite())
    teacher.most_bad = 0.01
    with pytest.raises(FloatingPointError, match="not finite"):
        store_in(tmp_path / "again", teacher).write(teacher, batches())
    wider = store_in(tmp_path / "wider", teacher, precision="bfloat16")
    teacher.most_bad = 0.1
    wider.write(teacher, batches())
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
