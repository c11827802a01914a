"""The verdict of an exactness test, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .table import show_table

EXACT, NOT_EXACT, BLIND = "exact", "not exact", "blind"
COLUMNS = ("variant", "greedy", "smallest p", "drafted", "control", "verdict")


def verdict_of(record: Mapping[str, Any], drafts: bool) -> dict[str, str]:
    """What the tests of a drafter say.

    Args:
        record: Its `greedy`, `sampling` and `control`.
        drafts: Whether it is one that drafts.
    """
    faults = [*_greedy_faults(record["greedy"]), *_sampling_faults(record["sampling"])]
    if faults:
        return {"verdict": NOT_EXACT, "words": f"not exact: {'; '.join(faults)}."}
    if drafts and not any(test["is_rejected"] for test in record["control"]):
        drafted = sum(test["num_draft_tokens"] for test in record["sampling"])
        why = "the biased control passed too" if drafted else "it drafted nothing after these prompts"
        words = f"this test could not have seen a fault: {why}. Take more samples, other prompts or another temperature."
        return {"verdict": BLIND, "words": words}
    parts = [_greedy_words(record["greedy"]), "the law of its samples is the target's"]
    parts.append("the biased control was seen" if drafts else "it drafts nothing, so there is no verification to be wrong")
    return {"verdict": EXACT, "words": f"exact: {'; '.join(parts)}."}


def in_words(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with its verdict: `passed` and `words` before all else.

    Args:
        result: With `rounding`, `power`, `prompts` and `results`.
    """
    by_verdict = {verdict: _names(result["results"], verdict) for verdict in (NOT_EXACT, BLIND, EXACT)}
    passed = not by_verdict[NOT_EXACT] and not by_verdict[BLIND]
    head = [f"NOT EXACT: {by_verdict[NOT_EXACT]}."] if by_verdict[NOT_EXACT] else []
    head += [f"NO VERDICT on {by_verdict[BLIND]}."] if by_verdict[BLIND] else []
    head += [f"{'EXACT, as far as this test sees' if passed else 'Exact'}: {by_verdict[EXACT]}."] if by_verdict[EXACT] else []
    own = [f"{one['variant']} is {one['words']}" if one["verdict"] != BLIND else f"{one['variant']}: {one['words']}"
           for one in result["results"]]  # fmt: skip
    words = [*head, *own, _power_words(result["power"], result["prompts"]), _rounding_words(result["rounding"])]
    return {"passed": passed, "words": words, **result}


def show_exactness(result: Mapping[str, Any]) -> None:
    """Prints the verdict.

    Args:
        result: What `measure_exactness` returns.
    """
    rows = [_row(one) for one in result["results"]]
    caption = (
        "greedy: texts with plain's tokens. smallest p: of the G-tests, one per prompt. drafted: accepted / drafted tokens in "
        "them. control: the p of the same test for drafts that lie about their law."
    )
    show_table("exactness", COLUMNS, rows, caption)
    for sentence in result["words"]:
        print(f"\n{sentence}")


def _names(results: Sequence[Mapping[str, Any]], verdict: str) -> str:
    return ", ".join(one["variant"] for one in results if one["verdict"] == verdict)


def _greedy_faults(greedy: Mapping[str, Any]) -> list[str]:
    places = [place for place in greedy["divergences"] if not place["is_explained"]]
    if not places:
        return []
    first = places[0]
    gap = "one text ended" if first["gap"] is None else f"the scores of the two tokens are {first['gap']:.2g} apart"
    where = f"token {first['position']} after prompt {first['prompt']}, where {gap}"
    return [f"{len(places)} of {greedy['rows']} greedy texts leave that of plain generation (the first at {where})"]


def _sampling_faults(tests: Sequence[Mapping[str, Any]]) -> list[str]:
    rejected = [test for test in tests if test["is_rejected"]]
    if not rejected:
        return []
    least = min(test["p_value"] for test in rejected)
    return [f"after {len(rejected)} of {len(tests)} prompts its samples do not have the target's law (p = {least:.1g})"]


def _greedy_words(greedy: Mapping[str, Any]) -> str:
    same, rows, places = greedy["identical"], greedy["rows"], greedy["divergences"]
    if not places:
        return f"{same} of {rows} greedy texts have the tokens of plain generation"
    largest = max(place["gap"] for place in places)
    others = f"the other {rows - same} part at near ties that rounding explains (gap {largest:.2g} at most)"
    return f"{same} of {rows} greedy texts have the tokens of plain generation, {others}"


def _power_words(power: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]) -> str:
    seen, tokens = power["total_variation"], prompts[0]["tokens"]
    if seen >= 1:
        what = "no change of that law would have been seen for sure"
    else:
        what = f"a change of that law by a total variation of {seen:.2g} would have been seen with probability "
        what += f"{power['probability']:g}"
    cells = min(prompt["cells"] for prompt in prompts)
    return (
        f"Each test had {power['samples']} samples in {cells} or more cells of the law of the first {tokens} tokens: {what}. "
        f"The probability of a false alarm in any of the {power['tests']} tests is {power['level']:g}."
    )


def _rounding_words(rounding: Mapping[str, Any]) -> str:
    return (
        f"Passes over one token and over several round differently: in {rounding['dtype'].removeprefix('torch.')}, by what "
        f"{rounding['positions']} places show, that explains another first token where the two best are up to "
        f"{rounding['explained_gap']:.2g} apart."
    )


def _row(one: Mapping[str, Any]) -> list[str]:
    greedy, tests, control = one["greedy"], one["sampling"], one["control"]
    drafted, accepted = (sum(test[name] for test in tests) for name in ("num_draft_tokens", "num_accepted_draft_tokens"))
    return [
        one["variant"],
        f"{greedy['identical']}/{greedy['rows']}",
        f"{min(test['p_value'] for test in tests):.2g}",
        f"{accepted}/{drafted}",
        f"{min(test['p_value'] for test in control):.1g}" if control else "",
        one["verdict"],
    ]
