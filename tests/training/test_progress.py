"""What people see of a run: a line for each report, and the time that is left."""

from types import SimpleNamespace

import pytest

from specheads.training import progress
from specheads.training.metrics import TrainingSums
from specheads.training.progress import Progress, short_line

LOSS = {"loss": 2.5, "expected_length": 1.4, "trained_tokens_per_second": 300.4, "hours_left": 0.5, "acceptance_1": 0.3}


def test_a_line_of_training() -> None:
    line = short_line({**LOSS, "acceptance_2": 0.25, "grad_norm": 1.0}, 10, 66)
    assert (
        line == "step 10 of 66: loss 2.500, expected length 1.400, acceptance by position 0.30 0.25, 300 tokens/s, 30 min left"
    )
    assert short_line({**LOSS, "hours_left": 2.0}, 10, 66).endswith("2.0 h left")


def test_a_line_of_an_evaluation() -> None:
    logs = {
        "eval_generate_mean_acceptance_length": 1.2,
        "eval_mean_acceptance_length": 1.25,
        "eval_acceptance_at_position_1": 0.2,
        "eval_acceptance_1": 0.3,
    }
    line = short_line(logs, 7, 66)
    assert line == "step 7 of 66: eval: mean acceptance length 1.250, in generate 1.200, acceptance by position 0.20"
    assert "task_maths: " in short_line({"task_maths_mean_acceptance_length": 1.0}, 66, 66)


def test_what_is_no_report_has_no_line() -> None:
    assert short_line({"epoch": 1.0}, 1, 2) == ""
    assert short_line({"train_runtime": 90.0, "train_loss": 2.0}, 2, 2) == "step 2 of 2: done in 1.5 min, mean loss 2.000"


def test_the_time_that_is_left_counts_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    shown = Progress(1)
    shown.on_train_begin(None, SimpleNamespace(global_step=0), None)
    now[0] += 10 + 20  # ten steps, and an evaluation among them
    shown.leave_out(20.0)
    state = SimpleNamespace(global_step=10, max_steps=30)
    assert shown.report(TrainingSums.empty(1), state)["hours_left"] * 3600 == pytest.approx(20 * (1 + 2))
