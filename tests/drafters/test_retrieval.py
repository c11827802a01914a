"""The datastore: what it finds, that a rebuild does not break its readers, and what it is refused for."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specheads
from specheads.drafters import retrieval_build
from specheads.drafters.base import Budget
from specheads.drafters.retrieval import RetrievalDrafter
from specheads.drafters.retrieval_store import BORDER, SORTED_BY, RetrievalStore, build_store, suffix_array

from ..exactness.test_greedy import prompt
from ..tiny import tiny
from .test_training_free import check_contract, context_for, paths_of
from .vocabularies import LETTERS, byte_level, spelling

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=4)


@given(documents=DOCUMENTS)
def test_suffixes_are_in_order(documents: list[list[int]]) -> None:
    tokens = np.array([token for document in documents for token in [*document, BORDER]])
    suffixes = suffix_array(tokens).tolist()
    assert sorted(suffixes) == np.flatnonzero(tokens != BORDER).tolist()
    begun = [tokens[place : place + SORTED_BY].tolist() for place in suffixes]
    assert begun == sorted(begun)


@given(documents=DOCUMENTS, text=st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_the_longest_match_is_found_wherever_it_is(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], text: list[int]
) -> None:
    store = build_store(tmp_path_factory.mktemp("store"), [*documents, [2]])
    tokens = store.tokens.tolist()
    wanted: tuple[int, list[int]] = (0, [])
    for length in range(1, min(len(text), SORTED_BY) + 1):
        found = [end for end in range(length, len(tokens)) if tokens[end - length : end] == text[-length:]]
        wanted = (length, found) if found else wanted
    length, places = store.longest_match(text)
    assert (length, sorted(places.tolist())) == wanted


def test_the_most_frequent_continuations_are_drafted(tmp_path: Path) -> None:
    build_store(tmp_path, [[2, 3, 4, 5], [2, 3, 4, 6], [2, 3, 7], [3, 8, 8, 3, 8], [9, 2, 3]])
    drafter, context = RetrievalDrafter(tmp_path), context_for([[9, 10, 2, 3], [11, 10]])
    drafter.begin(context)
    tree = drafter.propose(context, Budget([2, 2], 4))
    check_contract(tree, Budget([2, 2], 4), takes_trees=True)
    assert paths_of(tree, 0) == {(4,), (7,), (4, 5), (4, 6)}  # after 2 3, not after 3 alone, and not across the last border
    assert paths_of(tree, 1) == set()
    assert tree.tokens[0, 0] == 4
    context.rows[:] = [1]
    drafter.keep_rows([1])
    assert paths_of(drafter.propose(context, Budget([2], 4))) == set()


def test_readers_go_on_while_the_store_is_rebuilt(tmp_path: Path) -> None:
    build_store(tmp_path, [[1, 2, 3] * 50])
    first, faults = RetrievalStore(tmp_path), []

    def read() -> None:
        for _ in range(40):
            store = RetrievalStore(tmp_path)
            if store.longest_match([1, 2])[0] != 2 or first.longest_match([1, 2])[1].size != 50:
                faults.append(store)

    reader = threading.Thread(target=read)
    reader.start()
    for times in range(20):
        build_store(tmp_path, [[1, 2, 3] * (times + 1)])
    reader.join()
    assert not faults
    assert len(RetrievalStore(tmp_path).longest_match([1, 2])[1]) == 20
    assert len(list(tmp_path.iterdir())) == 3  # two versions, and the name of the one to read


def test_a_build_that_fails_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_store(tmp_path, [[1, 2, 3]])
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr("specheads.drafters.retrieval_store.suffix_array", lambda tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build_store(tmp_path, [[4, 5]])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert RetrievalStore(tmp_path).longest_match([1, 2])[0] == 2


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    target, ours, others = tiny(), spelling(LETTERS), spelling(LETTERS[::-1])
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"no datastore in .* make one with"):
            specheads.enable(target, drafter=f"retrieval:{folder}")
    for documents in ([], [[]]):
        with pytest.raises(ValueError, match="no tokens"):
            build_store(tmp_path, documents)
    for document, fault in (
        ([1.5], "whole numbers.*float64 such as"),
        ([True], "whole numbers.*bool"),
        (["2"], "whole numbers"),
        (3, "whole numbers.*0 dimensions"),
        ([[1, 2], [3, 4]], "whole numbers.*2 dimensions"),
        ([[1, 2], [3]], "whole numbers.*2 dimensions"),
        ([1, -1], "from 0 to 2147483647, and document 1 .* holds -1"),
        ([2**31], "holds 2147483648"),
        (np.array([2**40]), "holds 1099511627776"),
        ([2**70], "whole numbers"),
    ):
        with pytest.raises(ValueError, match=fault):
            build_store(tmp_path, [[1, 2], document])
    with pytest.raises(ValueError, match="token 40, which is not below"):
        build_store(tmp_path, [[40]], vocab_size=40)
    build_store(tmp_path, [[3, 4, 5]], ours)
    with pytest.raises(ValueError, match="another tokenizer"):
        specheads.enable(target, drafter=f"retrieval:{tmp_path}", tokenizer=others)
    specheads.enable(target, drafter=f"retrieval:{tmp_path}", tokenizer=ours)
    with pytest.raises(ValueError, match="ids below 32, and the target's vocabulary has 16"):
        specheads.enable(tiny(vocab_size=16), drafter=f"retrieval:{tmp_path}")
    version = tmp_path / (tmp_path / "current").read_text()
    description = json.loads((version / "store.json").read_text())
    (version / "store.json").write_text(json.dumps({**description, "layout": 9}))
    with pytest.raises(ValueError, match="layout 9"):
        RetrievalStore(tmp_path)
    for broken in ("{", "{}", "[]"):
        (version / "store.json").write_text(broken)
        with pytest.raises(ValueError, match=r"datastore in .*cannot be read .*build it anew"):
            RetrievalStore(tmp_path)
    (version / "store.json").write_text(json.dumps(description))
    (version / "suffixes.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"datastore in .*cannot be read .*build it anew"):
        RetrievalStore(tmp_path)


def test_the_command_builds_a_store_that_a_call_can_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_level(300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("the lazy dog", encoding="utf-8")
    chat = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "an old buckler"}]
    lines = [{"text": "a greyhound"}, {"text": [5, 6, 7]}, {"text": chat}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    files, store = [str(tmp_path / name) for name in ("a.txt", "b.jsonl")], tmp_path / "store"
    retrieval_build.main([*files, "--output", str(store), "--tokenizer", str(tmp_path / "tokenizer")])
    said = capsys.readouterr().out
    assert "4 documents" in said and f"retrieval:{store}" in said
    found = RetrievalStore(store)
    for text, length in (("the lazy dog", 12), ("an old buckler", 14), ("no", 0)):
        ids = tokenizer(text).input_ids
        assert (found.longest_match(ids)[0] == min(len(ids), SORTED_BY)) == (length > 0)
    target = specheads.enable(tiny(vocab_size=300))
    inputs = prompt("llama", 2)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=8)
    settings = {"drafter": f"retrieval:{store}"}
    assert torch.equal(target.generate(**inputs, do_sample=False, max_new_tokens=8, speculative=settings), plain)
    for line, fault in (('{"other": 1}', ": the field 'text'"), ("{", ", is not JSON"), ("[1]", ", must be a JSON object")):
        (tmp_path / "b.jsonl").write_text(f"{line}\n")
        with pytest.raises(ValueError, match=f"b.jsonl, line 1{fault}"):
            retrieval_build.main([files[1], "--output", str(store), "--tokenizer", str(tmp_path / "tokenizer")])
