"""What `print(output.speculation)` says."""

from specheads.stats import SpeculationStats


def test_the_pooled_counts_in_a_line() -> None:
    stats = SpeculationStats.for_batch(2, per_step=False)
    stats.record_round([0, 1], [3, 0], [3, 0], [[1, 2], []], [[5, 6, 7], [8]])
    assert str(stats) == "4 tokens in 2 rounds, mean acceptance length 2.00; 2 of 3 drafted tokens accepted"
