"""What a run reports of its speed, and how it shows what it reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerCallback

from .metrics import TrainingSums

LENGTH = "mean_acceptance_length"


class Progress(TrainerCallback):
    """Adds up what steps found, until it is reported.

    Args:
        depth: K.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.sums = TrainingSums.empty(depth)
        self.began, self.step, self.first_step = time.perf_counter(), 0, 0
        self.left_out = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Starts the clock."""
        self.first_step, self.left_out = state.global_step, 0.0
        self.restart(state.global_step)

    def restart(self, step: int) -> None:
        """Begins anew from a step."""
        self.sums = TrainingSums.empty(self.depth)
        self.began, self.step = time.perf_counter(), step

    def leave_out(self, seconds: float) -> None:
        """Does not count some time as training's: an evaluation's, of which there will be as many again as there were."""
        self.began += seconds
        self.left_out += seconds

    def report(self, sums: TrainingSums, state: Any) -> dict[str, float]:
        """What there is to say since the last report, and begins anew.

        Args:
            sums: Those of all processes.
            state: The trainer's.
        """
        seconds = max(time.perf_counter() - self.began, 1e-9)
        between = self.left_out / max(state.global_step - self.first_step, 1)
        left = (state.max_steps - state.global_step) * (seconds / max(state.global_step - self.step, 1) + between)
        self.restart(state.global_step)
        return {
            "expected_length": sums.expected_length,
            "trained_tokens_per_second": float(sums.values[0, 0]) / seconds,
            "hours_left": left / 3600,
            **by_position("acceptance", sums.acceptance),
            **by_position("conditional_acceptance", sums.conditional_acceptance),
        }


class ShortLines(ProgressCallback):
    """The progress bar of `transformers`, with a short line for each report; all figures are in what reporters get."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **others: Any) -> None:
        """Prints the line of a report, above the bar if there is one."""
        line = short_line(logs or {}, state.global_step, state.max_steps)
        if state.is_world_process_zero and line:
            tqdm.write(line)


def short_line(logs: Mapping[str, Any], step: int, steps: int) -> str:
    """What people want to see of a report while they wait; empty if it has nothing of it.

    Args:
        logs: The report.
        step: At which step it is made.
        steps: How many there are.
    """
    prefixes = [name.removesuffix(LENGTH) for name in logs if name.endswith(LENGTH)]
    if prefixes:
        prefix = min(prefixes, key=len)  # the other one is of what `generate` did
        generated = logs.get(f"{prefix}generate_{LENGTH}")
        parts = [
            f"{prefix.rstrip('_')}: mean acceptance length {logs[prefix + LENGTH]:.3f}",
            *([] if generated is None else [f"in generate {generated:.3f}"]),
            f"acceptance by position {_positions(logs, f'{prefix}acceptance_at_position_')}",
        ]
    elif "loss" in logs:
        minutes = logs["hours_left"] * 60
        parts = [
            f"loss {logs['loss']:.3f}",
            f"expected length {logs['expected_length']:.3f}",
            f"acceptance by position {_positions(logs, 'acceptance_')}",
            f"{logs['trained_tokens_per_second']:.0f} tokens/s",
            f"{minutes:.0f} min left" if minutes < 90 else f"{minutes / 60:.1f} h left",
        ]
    elif "train_runtime" in logs:
        parts = [f"done in {logs['train_runtime'] / 60:.1f} min", f"mean loss {logs['train_loss']:.3f}"]
    else:
        return ""
    return f"step {step} of {steps}: {', '.join(parts)}"


def _positions(logs: Mapping[str, Any], name: str) -> str:
    found: list[str] = []
    while (value := logs.get(f"{name}{len(found) + 1}")) is not None:
        found.append(f"{value:.2f}")
    return " ".join(found)


def by_position(name: str, values: list[float]) -> dict[str, float]:
    """Figures of all positions of a draft under names of their own, counted from 1."""
    return {f"{name}_{place}": value for place, value in enumerate(values, start=1)}
