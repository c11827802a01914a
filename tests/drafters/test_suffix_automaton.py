"""The suffix automaton against a search through the text."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specheads.drafters.suffix_automaton import COUNTED_SUFFIXES, ROOT, SuffixAutomaton, index_of

# Short enough for counts to be exact, few tokens for suffixes to repeat.
SEGMENTS = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=3)


def flat(segments: list[list[int]]) -> list[int]:
    """One text, with a token that occurs nowhere else at each border."""
    text = list(segments[0])
    for border, segment in enumerate(segments[1:], 1):
        text += [-border, *segment]
    return text


def ends_of(words: list[int], text: list[int]) -> list[int]:
    return [end for end in range(len(words), len(text) + 1) if text[end - len(words) : end] == words]


def longest_repeated_suffix(text: list[int], segment_length: int) -> list[int]:
    for length in range(segment_length, 0, -1):
        if len(ends_of(text[-length:], text)) > 1:
            return text[-length:]
    return []


def followed_by(words: list[int], text: list[int]) -> dict[int, tuple[int, int]]:
    """Token -> how often it followed the words, and where it last did."""
    places = defaultdict(list)
    for end in ends_of(words, text):
        if end < len(text) and text[end] >= 0:
            places[text[end]].append(end)
    return {token: (len(ends), ends[-1]) for token, ends in places.items()}


def known(automaton: SuffixAutomaton, state: int) -> dict[int, tuple[int, int]]:
    return {each.token: (each.times, each.latest) for each in automaton.continuations(state)}


def state_of(automaton: SuffixAutomaton, words: list[int]) -> int:
    state = ROOT
    for word in words:
        state = next(each.state for each in automaton.continuations(state) if each.token == word)
    return state


@given(SEGMENTS)
def test_match_and_its_continuations_after_every_token(segments):
    automaton, so_far = SuffixAutomaton(), []
    for number, segment in enumerate(segments):
        if number:
            automaton.start_segment()
        so_far.append([])
        for token in segment:
            automaton.extend([token])
            so_far[-1].append(token)
            text = flat(so_far)
            suffix = longest_repeated_suffix(text, len(so_far[-1]))
            assert automaton.match_length == len(suffix)
            if suffix:
                assert known(automaton, automaton.match) == followed_by(suffix, text)
            else:
                assert automaton.match == ROOT


@given(SEGMENTS)
def test_every_substring_leads_to_its_continuations(segments):
    text, automaton = flat(segments), index_of(segments)
    for segment in segments:
        for start in range(len(segment)):
            for end in range(start + 1, len(segment) + 1):
                words = segment[start:end]
                assert known(automaton, state_of(automaton, words)) == followed_by(words, text)


@given(SEGMENTS)
def test_shorter_suffixes_occurred_more_often(segments):
    text, automaton = flat(segments), index_of(segments)
    suffix = longest_repeated_suffix(text, len(segments[-1]))
    state = automaton.match
    while suffix:
        times = len(ends_of(suffix, text))
        suffix = next((suffix[cut:] for cut in range(1, len(suffix)) if len(ends_of(suffix[cut:], text)) > times), [])
        state = automaton.shorter(state)
        assert automaton.lengths[state] == len(suffix)
    assert state == ROOT


@given(SEGMENTS, st.integers(1, 5))
def test_pieces_give_the_same_as_one_go(segments, size):
    whole, pieces = index_of(segments), index_of([*segments[:-1], []])
    for start in range(0, len(segments[-1]), size):
        pieces.extend(segments[-1][start : start + size])
    assert vars(pieces) == vars(whole)


@given(SEGMENTS)
def test_there_are_at_most_two_states_a_token(segments):
    text = flat(segments)
    assert len(index_of(segments).lengths) <= 2 * len(text) + 1


@pytest.mark.parametrize("period", [1, 3])
def test_long_repetition(period):
    """Counting all suffixes of this text would take a billion steps."""
    length = 50_000 - 50_000 % period
    automaton = index_of([list(range(period)) * (length // period)])
    assert automaton.match_length == length - period
    (following,) = automaton.continuations(automaton.match)
    assert (following.token, following.latest) == (0, length - period)


def test_counts_of_a_long_repetition_are_never_too_high():
    automaton = index_of([[7] * (3 * COUNTED_SUFFIXES)])
    state, length = automaton.match, automaton.match_length
    while state != ROOT:
        (following,) = automaton.continuations(state)
        assert 1 <= following.times <= 3 * COUNTED_SUFFIXES - length
        state, length = automaton.shorter(state), length - 1
    assert length == 0
