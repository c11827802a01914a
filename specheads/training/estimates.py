"""What a run will take, said before it begins."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .batch import TrainingBatch, count_trained
from .step import DraftTraining

BYTES_PER_WEIGHT = 4  # heads are trained in single precision
GIB = 2**30


def estimate(drafts: DraftTraining, batches: Iterable[dict[str, Tensor]], args: Any, written: int | None) -> str:
    """A line with parameters, memory, disk and time.

    Args:
        drafts: The head in training.
        batches: A few of its batches, which are run once forwards and backwards to see how long that takes.
        args: The training arguments.
        written: How many tokens of all the data are learned; `None` if that is not known.
    """
    trained = sum(weight.numel() for weight in drafts.parameters() if weight.requires_grad)
    weights = sum(weight.numel() for weight in drafts.parameters())
    target = drafts.teacher.target
    held = sum(weight.numel() * weight.element_size() for weight in target.parameters())
    # Weights, gradients, and the two moments of Adam.
    memory = held + BYTES_PER_WEIGHT * (weights + 3 * trained)
    checkpoint = BYTES_PER_WEIGHT * (weights + 2 * trained)
    disk = checkpoint * (args.save_total_limit or 1) + BYTES_PER_WEIGHT * weights
    parts = [
        f"{trained:,} parameters are trained (of the head's {weights:,}; the target's {target.num_parameters():,} are not)",
        f"memory {memory / GIB:.1f} GiB besides activations",
        f"disk {disk / GIB:.2f} GiB for {args.save_total_limit or 'each'} checkpoint(s) and the head",
    ]
    return "; ".join([*parts, _time(drafts, batches, args, written)]) + "."


def _time(drafts: DraftTraining, batches: Iterable[dict[str, Tensor]], args: Any, written: int | None) -> str:
    tokens, seconds = 0, 0.0
    with torch.random.fork_rng([drafts.head.device] if drafts.head.device.type == "cuda" else []):
        for batch in batches:
            inputs = TrainingBatch(**{name: value.to(args.device) for name, value in batch.items()})
            began = time.perf_counter()
            drafts(inputs).loss_sum.backward()
            trained = int(count_trained(inputs))  # waits for the device
            seconds += time.perf_counter() - began
            tokens += trained
    drafts.zero_grad()
    speed = tokens / max(seconds, 1e-9)
    words = f"about {speed:,.0f} trained tokens per second and process"
    if args.max_steps > 0:
        per_step = tokens * args.gradient_accumulation_steps  # of one batch
        return f"{words}, {_duration(args.max_steps * per_step / max(speed, 1e-9))}"
    if written is None:
        return words
    return f"{words}, {_duration(written * args.num_train_epochs / args.world_size / max(speed, 1e-9))}"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{max(1, round(minutes))} minute{'s' * (minutes >= 1.5)}"
