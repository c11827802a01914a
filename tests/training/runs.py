"""Small training runs through the command."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from specheads.training.command_line import parse
from specheads.training.heads_command import KINDS, train

SENTENCE = "Paris is the capital of France and a country in Europe . What answer forty two yes no you are helpful"
WORDS = SENTENCE.split()


def write_chats(file: Path, count: int = 24, seed: int = 0) -> Path:
    """Chats of different lengths."""
    lines = []
    for number in range(seed, seed + count):
        words = [WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(6 + number % 9)]
        turns = [{"role": "user", "content": WORDS[number % len(WORDS)]}, {"role": "assistant", "content": " ".join(words)}]
        lines.append(json.dumps({"messages": turns}))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
    return file


def flags(target: Path, data: Path, output: Path, *more: str) -> list[str]:
    """A command line for a short run in single precision on the CPU."""
    given = {
        "model_name_or_path": target,
        "dtype": "float32",
        "dataset_name": data,
        "output_dir": output,
        "draft_vocab_size": 48,
        "depth": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": "true",
        "dataloader_pin_memory": "false",
        "use_cpu": "true",
        "seed": 3,
    }
    named = dict(zip(more[::2], more[1::2], strict=True))
    return [word for name, value in {**given, **named}.items() for word in (f"--{name}", str(value))]


def run(arguments: Sequence[str], callbacks: Sequence[Any] = ()) -> Any:
    """Trains, and gives the trainer."""
    return train(*parse(KINDS, "heads.py", None, arguments), callbacks=callbacks)


def losses(folder: Path) -> list[float]:
    """The losses that the last checkpoint of a run has noted."""
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda file: int(file.parent.name.split("-")[1]))
    history = json.loads(states[-1].read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


class KillAt(TrainerCallback):
    """Ends the process without warning after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Callable[[], None], **environment: str) -> multiprocessing.process.BaseProcess:
    """A process of its own that begins as a copy of this one, without its distributed state."""

    def begin() -> None:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        os.environ.update(environment)
        work()

    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    return process


def in_two_processes(work: Callable[[], None]) -> list[int | None]:
    """Exit codes of two processes that do the same work together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    common |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    processes = [forked(work, **common, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def shard_on_cpu() -> None:
    """Has accelerate shard the model, which it does on no CPU however much it is asked to: its decision is overruled."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    decide = AcceleratorState.__init__

    def overruled(state: Any, *args: Any, **others: Any) -> None:
        decide(state, *args, **others)
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin(fsdp_version=2)

    AcceleratorState.__init__ = overruled
