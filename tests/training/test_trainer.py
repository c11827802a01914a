from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import specheads
from specheads.evaluation.prompts import InputError
from specheads.heads.vocabulary import ids_from_offsets
from specheads.training.checkpoints import CheckpointError
from specheads.training.heads_command import main
from specheads.training.trainer import HeadTrainer

from .runs import KillAt, flags, forked, in_two_processes, losses, run, shard_on_cpu, write_chats

SAVING = ("--save_strategy", "steps", "--save_steps", "4", "--save_total_limit", "2")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


def _saving(*more: str) -> list[str]:
    return [word.removeprefix("--") for word in (*SAVING, *more)]


def test_head_is_trained_saved_and_loaded(target_folder: Path, chats: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("head: eagle3\nlearning_rate: 1e-2\nloss: {lk: {eta: 3}, cross_entropy: 0.1}\nmax_steps: 99\n")
    before = load_file(target_folder / "model.safetensors")
    arguments = flags(target_folder, chats, tmp_path / "out", "max_steps", "20")
    arguments = [word for word in arguments if word not in ("--learning_rate", "0.01")]
    assert main(["--config", str(recipe), *arguments]) == 0
    saved = load_file(tmp_path / "out" / "model.safetensors")
    known = ids_from_offsets(saved["d2t"])
    assert len(set(known.tolist())) == 48 and saved["lm_head.weight"].shape[0] == 48
    assert all(torch.equal(weight, before[name]) for name, weight in load_file(target_folder / "model.safetensors").items())
    config = specheads.EagleConfig.from_pretrained(tmp_path / "out")
    depth = int(arguments[arguments.index("--depth") + 1])
    assert config.facts().vllm == {"method": "eagle3", "num_speculative_tokens": depth} and depth != 5
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    specheads.enable(model, drafter=str(tmp_path / "out"), draft_tokens=3, adaptive=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, speculative=True), plain)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--learning_rat", "1"], "did you mean '--learning_rate'"),
        (["--loss", "no_such"], "no_such"),
        (["--head", "eagle9"], "eagle9"),
        (["--draft_vocab_size", "0"], "special tokens"),
        (["--resume_from_checkpoint", "true"], "no checkpoint"),
        (["--dataset_name", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--model_name_or_path", "./no/such"], "The model ./no/such cannot be loaded: there is no such folder"),
        (["--dtype", "double"], "`dtype` must be one of auto, float32"),
        (["--learning_rate", "nan"], "`learning_rate` must be a finite number"),
        (["--lora_learning_rate", "-1"], "`lora_learning_rate` must be a finite number"),
        (["--per_device_train_batch_size", "0"], "`per_device_train_batch_size` must be at least 1"),
        (["--gradient_accumulation_steps", "0"], "`gradient_accumulation_steps` must be at least 1"),
        (["--seed", "-1"], "`seed` must be from 0"),
        (["--muon_learning_rate", "inf"], "`muon_learning_rate` must be a finite number"),
        (["--muon_learning_rate", "0.01", "--optim", "sgd"], "all other weights are trained by adamw_torch, got sgd"),
        (["--muon_learning_rate", "0.01", "--head", "medusa", "--lora_rank", "2"], "train without an adapter"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_bad_input_is_one_sentence(
    more: list[str], said: str, target_folder: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags(target_folder, chats, tmp_path / "out", "max_steps", "1"), *more]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_unknown_key_of_a_recipe_is_named(target_folder: Path, chats: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "recipe.yaml").write_text("dept: 3\n")
    assert main(["--config", str(tmp_path / "recipe.yaml"), *flags(target_folder, chats, tmp_path / "out")]) == 2
    assert "'dept'" in capsys.readouterr().err


@pytest.mark.parametrize("optimiser", [[], ["muon_learning_rate", "0.01"]], ids=["adamw", "muon"])
def test_killed_run_goes_on_as_if_it_had_not_been(
    optimiser: list[str], target_folder: Path, chats: Path, tmp_path: Path
) -> None:
    # 12 batches an epoch: the kill after step 18 is in the middle of the second, two steps after a checkpoint.
    more = _saving("--num_train_epochs", "2", "--feature_noise", "0.1", "--eval_strategy", "steps", "--eval_steps", "5")
    more += ["eval_examples", "2", "generate_tokens", "4", *optimiser]
    write_chats(longer := tmp_path / "chats.jsonl", 26)
    unbroken = run(flags(target_folder, longer, tmp_path / "unbroken", *more))
    killed = flags(target_folder, longer, tmp_path / "killed", *more)
    process = forked(lambda: run(killed, [KillAt(18)]))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resumed = run([*killed, "--resume_from_checkpoint", "true"])
    assert len(losses(tmp_path / "unbroken")) == 24
    assert losses(tmp_path / "killed") == losses(tmp_path / "unbroken")
    for ours, theirs in zip(resumed.head.parameters(), unbroken.head.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(InputError, match="already has checkpoint-24"):
        run(killed)
    with pytest.raises(InputError, match="examples_per_step was 2 and is 4"):
        run([*killed, "--resume_from_checkpoint", "true", "--gradient_accumulation_steps", "2"])
    with pytest.raises(InputError, match="data was"):
        run([*killed, "--resume_from_checkpoint", "true", "--dataset_name", str(chats)])


def test_kill_while_saving_leaves_the_checkpoint_before(
    target_folder: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = flags(target_folder, chats, tmp_path / "out", *_saving("--max_steps", "8", "--save_total_limit", "1"))
    save = HeadTrainer._save_rng_state

    def die(trainer: HeadTrainer, folder: str) -> None:
        if trainer.state.global_step == 8:
            KillAt(8).on_step_end(None, trainer.state, None)
        save(trainer, folder)

    monkeypatch.setattr(HeadTrainer, "_save_rng_state", die)
    process = forked(lambda: run(arguments))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    monkeypatch.undo()
    folders = {path.name for path in (tmp_path / "out").iterdir()}
    assert folders == {"checkpoint-4", ".writing-checkpoint-8"}
    trainer = run([*arguments, "--resume_from_checkpoint", "true"])
    assert trainer.state.global_step == 8
    assert {path.name for path in (tmp_path / "out").glob("*checkpoint*")} == {"checkpoint-8"}


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing")])
def test_full_disk_is_one_sentence_and_leaves_the_checkpoint_before(
    fault: Exception, target_folder: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(trainer: HeadTrainer, folder: str) -> None:
        if trainer.state.global_step == 8:
            raise fault

    monkeypatch.setattr(HeadTrainer, "_save_rng_state", fail)
    arguments = flags(target_folder, chats, tmp_path / "out", *_saving("--max_steps", "8", "--save_total_limit", "1"))
    with pytest.raises(CheckpointError, match=r"cannot be written .*checkpoint-4 is whole and can be resumed from\.$"):
        run(arguments)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint-4"}


def test_folder_that_cannot_be_written_is_said_before_anything_is_loaded(
    target_folder: Path, chats: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run(flags(target_folder, chats, tmp_path / "file" / "out"))


@pytest.fixture(scope="module")
def accumulated(target_folder: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that takes two batches to a step."""
    folder = tmp_path_factory.mktemp("accumulated")
    run(flags(target_folder, chats, folder, *_saving("--max_steps", "8"), "gradient_accumulation_steps", "2"))
    return folder


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_train_as_one_also_when_killed_and_resumed(
    fsdp: bool, accumulated: Path, target_folder: Path, chats: Path, tmp_path: Path
) -> None:
    more = ["eval_strategy", "steps", "eval_steps", "8", "eval_dataset_name", str(chats), "generate_tokens", "4"]
    arguments = flags(target_folder, chats, tmp_path, *_saving("--max_steps", "8"), *more)

    def work(*others: str, callbacks: Sequence[Any] = ()) -> None:
        if fsdp:
            shard_on_cpu()
        trainer = run([*arguments, *others], callbacks)
        sharded = [isinstance(weight, DTensor) for weight in trainer.model.parameters()]
        assert trainer.accelerator.num_processes == 2 and all(sharded) == any(sharded) == fsdp

    # Killed after the first of two checkpoints, and resumed.
    assert in_two_processes(lambda: work(callbacks=[KillAt(6)])) == [-signal.SIGKILL] * 2
    assert in_two_processes(lambda: work("--resume_from_checkpoint", "true")) == [0, 0]
    assert losses(tmp_path) == pytest.approx(losses(accumulated), rel=1e-4)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(accumulated / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1, 4])
def test_loss_does_not_depend_on_how_batches_are_split(
    size: int, accumulated: Path, target_folder: Path, chats: Path, tmp_path: Path
) -> None:
    # Without grouping by length the order is that of the examples, whatever the size of batches.
    order = ["train_sampling_strategy", "sequential", *_saving("--max_steps", "4")]
    split = ["per_device_train_batch_size", str(size), "gradient_accumulation_steps", str(4 // size)]
    run(flags(target_folder, chats, tmp_path / "split", *order, *split))
    run(flags(target_folder, chats, tmp_path / "usual", *order, "gradient_accumulation_steps", "2"))
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "usual"), rel=1e-4)


def test_feature_store_gives_the_same_losses(target_folder: Path, chats: Path, tmp_path: Path) -> None:
    more = _saving("--max_steps", "4")
    run(flags(target_folder, chats, tmp_path / "online", *more))
    run(flags(target_folder, chats, tmp_path / "stored", *more, "feature_store", str(tmp_path / "store")))
    # The store is in half precision.
    assert losses(tmp_path / "stored") == pytest.approx(losses(tmp_path / "online"), rel=2e-2)


def test_evaluation_chooses_the_best_and_reports_positions(target_folder: Path, chats: Path, tmp_path: Path) -> None:
    more = ["eval_dataset_name", str(chats), "eval_strategy", "steps", "eval_steps", "4", "load_best_model_at_end", "true"]
    trainer = run(flags(target_folder, chats, tmp_path, *_saving("--max_steps", "8"), *more, "generate_prompts", "2"))
    history = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    evaluated = [entry for entry in history if "eval_mean_acceptance_length" in entry]
    lengths = {entry["step"]: entry["eval_mean_acceptance_length"] for entry in evaluated}
    assert trainer.state.best_metric == max(lengths.values()) and set(lengths) == {4, 8}
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{max(lengths, key=lengths.__getitem__)}")
    for name in ("acceptance", "conditional_acceptance", "acceptance_at_position", "top1_agreement", "top5_agreement"):
        assert all(0 <= evaluated[0][f"eval_{name}_{place}"] <= 1 for place in (1, 2, 3))
    assert evaluated[0]["eval_generate_mean_acceptance_length"] >= 1


def test_evaluation_does_not_change_training(target_folder: Path, chats: Path, tmp_path: Path) -> None:
    more = [*_saving("--max_steps", "4", "--feature_noise", "0.1"), "eval_examples", "2", "generate_tokens", "4"]
    run(flags(target_folder, chats, tmp_path / "without", *more))
    run(flags(target_folder, chats, tmp_path / "with", *more, "eval_strategy", "steps", "eval_steps", "1"))
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


@pytest.mark.parametrize("way", [["packing", "true"], ["streaming", "true"], ["packing", "true", "streaming", "true"]])
def test_packed_and_streamed_data(way: list[str], target_folder: Path, chats: Path, tmp_path: Path) -> None:
    more = [*_saving("--max_steps", "4"), *way, "max_length", "128", "per_device_train_batch_size", "1"]
    more += ["eval_dataset_name", str(chats), "eval_strategy", "steps", "eval_steps", "4"]
    trainer = run(flags(target_folder, chats, tmp_path, *more))
    assert trainer.state.global_step == 4 and len(losses(tmp_path)) == 4
    assert any("eval_mean_acceptance_length" in entry for entry in trainer.state.log_history)


def test_head_can_be_trained_on(target_folder: Path, chats: Path, tmp_path: Path) -> None:
    # What the draft vocabulary lacks bounds acceptance here, and the divergence goes on falling.
    loss = ["loss", "forward_kl"]
    run(flags(target_folder, chats, tmp_path / "first", *_saving("--max_steps", "8"), *loss))
    first = losses(tmp_path / "first")
    more = [*_saving("--max_steps", "4", "--head_name_or_path", str(tmp_path / "first")), *loss]
    trainer = run(flags(target_folder, chats, tmp_path / "second", *more))
    assert losses(tmp_path / "second")[0] < first[0] and trainer.head.config.own_vocab_size == 48
