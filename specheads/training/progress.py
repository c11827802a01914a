"""What a run reports of its speed."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from .metrics import TrainingSums


class Progress(TrainerCallback):
    """Adds up what steps found, until it is reported.

    Args:
        depth: K.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.sums = TrainingSums.empty(depth)
        self.began, self.step = time.perf_counter(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Starts the clock."""
        self.restart(state.global_step)

    def restart(self, step: int) -> None:
        """Begins anew from a step."""
        self.sums = TrainingSums.empty(self.depth)
        self.began, self.step = time.perf_counter(), step

    def leave_out(self, seconds: float) -> None:
        """Does not count some time as training's."""
        self.began += seconds

    def report(self, sums: TrainingSums, state: Any) -> dict[str, float]:
        """What there is to say since the last report, and begins anew.

        Args:
            sums: Those of all processes.
            state: The trainer's.
        """
        seconds = max(time.perf_counter() - self.began, 1e-9)
        left = (state.max_steps - state.global_step) * seconds / max(state.global_step - self.step, 1)
        self.restart(state.global_step)
        return {
            "expected_length": sums.expected_length,
            "trained_tokens_per_second": float(sums.values[0, 0]) / seconds,
            "hours_left": left / 3600,
            **by_position("acceptance", sums.acceptance),
            **by_position("conditional_acceptance", sums.conditional_acceptance),
        }


def by_position(name: str, values: list[float]) -> dict[str, float]:
    """Figures of all positions of a draft under names of their own, counted from 1."""
    return {f"{name}_{place}": value for place, value in enumerate(values, start=1)}
