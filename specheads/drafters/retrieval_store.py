"""A datastore on disk: a corpus of token ids and its suffix array, to look up how a text went on elsewhere.

A store is a folder of versions. Each is a folder with `tokens.npy`, `suffixes.npy` and `store.json`, complete and never changed
once it bears its name; the file `current` names the one to read. A rebuild writes a version beside the others and then changes
`current`, so whoever reads the store goes on with the version that they opened. The version before stays too.

Shapes: n tokens of the corpus, borders between its documents included; s suffixes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

BORDER = -1  # between documents: no match and no continuation reaches across
SORTED_BY = 16  # how many tokens of a suffix its place in the array goes by
CURRENT, DESCRIPTION = "current", "store.json"
LAYOUT = 1
GREATEST_ID = 2**31 - 1  # the corpus is kept in 32 bits
KEPT_VERSIONS = 2
OPENINGS = 5


@dataclass(frozen=True)
class Description:
    """What `store.json` says.

    Args:
        layout: Of the files.
        tokenizer: The fingerprint of the tokenizer whose ids the corpus has; `None` if it is not known.
        vocab_size: More than any id of the corpus.
        documents: How many there are.
        tokens: How many tokens they have.
    """

    layout: int
    tokenizer: str | None
    vocab_size: int
    documents: int
    tokens: int


class RetrievalStore:
    """A version of a store, read from disk as it is needed.

    Args:
        folder: The store.

    Raises:
        ValueError: if there is no store, or one of another layout.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        for attempt in range(OPENINGS):
            try:
                version = self.folder / (self.folder / CURRENT).read_text().strip()
                self.description = _described(version)
                # Views of the files as plain arrays, which are quicker to look into.
                self.tokens = np.asarray(np.load(version / "tokens.npy", mmap_mode="r"))  # [n]
                self.suffixes = np.asarray(np.load(version / "suffixes.npy", mmap_mode="r"))  # [s]
                return
            except FileNotFoundError as error:
                # Between the two reads others may have rebuilt the store so often that the version has gone.
                if attempt + 1 == OPENINGS or not (self.folder / CURRENT).exists():
                    raise ValueError(
                        f"There is no datastore in {str(self.folder)!r}; make one with "
                        "`python -m specheads.drafters.retrieval_build`."
                    ) from error
            except (KeyError, TypeError, ValueError, EOFError, OSError) as error:
                raise ValueError(
                    f"The datastore in {str(self.folder)!r} cannot be read ({type(error).__name__}: {error}); build it anew."
                ) from error

    def longest_match(self, text: Sequence[int]) -> tuple[int, np.ndarray]:
        """Where the longest end of a text that the corpus has goes on.

        Args:
            text: Tokens; no more than the last `SORTED_BY` count.

        Returns:
            Its length, and the places `[r]` of the tokens that come after it in the corpus; 0 and none if even the last token
            is new.
        """
        text = text[-SORTED_BY:]
        shortest, longest = 0, len(text)
        found = (0, 0)
        while shortest < longest:
            length = (shortest + longest + 1) // 2
            span = self._span(text[len(text) - length :])
            if span[0] < span[1]:
                shortest, found = length, span
            else:
                longest = length - 1
        return shortest, self.suffixes[slice(*found)] + shortest if shortest else np.empty(0, np.int64)

    def _span(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Which suffixes begin with some tokens."""
        wanted = list(tokens)

        def beginning(place: int) -> list[int]:
            start = int(self.suffixes[place])
            return self.tokens[start : start + len(wanted)].tolist()

        low = bisect_left(range(len(self.suffixes)), wanted, key=beginning)
        return low, bisect_right(range(len(self.suffixes)), wanted, lo=low, key=beginning)


def build_store(
    folder: str | os.PathLike[str], documents: Iterable[Sequence[int]], tokenizer: Any = None, vocab_size: int | None = None
) -> RetrievalStore:
    """Makes a datastore, or a new version of one, which whoever opens it from then on reads.

    Args:
        folder: The store; made if it is not there.
        documents: Token ids of texts that have nothing to do with each other: a corpus, or earlier outputs.
        tokenizer: What the ids are of; its fingerprint is kept, to be compared with the target's.
        vocab_size: More than any id; `None` for the tokenizer's, or else for what the documents need.

    Raises:
        ValueError: if there are no tokens, a document is no list of whole numbers, or one is negative or not below
            `vocab_size`.
    """
    tokens, count = _joined(documents)
    said = tokens[tokens != BORDER]
    if not said.size:
        raise ValueError("The documents hold no tokens; a datastore needs some.")
    size = vocab_size or (1 + int(said.max()) if tokenizer is None else max(1 + int(said.max()), len(tokenizer)))
    if int(said.max()) >= size:
        raise ValueError(f"The documents hold the token {int(said.max())}, which is not below the vocabulary size {size}.")
    fingerprint = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    description = Description(LAYOUT, fingerprint, size, count, int(said.size))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as scratch:
        version = Path(scratch) / "version"
        version.mkdir()
        np.save(version / "tokens.npy", tokens)
        np.save(version / "suffixes.npy", suffix_array(tokens))
        (version / DESCRIPTION).write_text(json.dumps(asdict(description), indent=2))
        # Names in the order of time; the scratch folder's is unique.
        name = f"{time.time_ns():020d}{Path(scratch).name.removeprefix('.unfinished')}"
        version.rename(folder / name)
        (Path(scratch) / CURRENT).write_text(name)
        os.replace(Path(scratch) / CURRENT, folder / CURRENT)
    versions = sorted(path.parent for path in folder.glob(f"*/{DESCRIPTION}"))
    for old in versions[:-KEPT_VERSIONS]:
        shutil.rmtree(old, ignore_errors=True)
    return RetrievalStore(folder)


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """The places of all tokens but borders, in the order of the `SORTED_BY` tokens that begin there.

    By doubling: an order by h tokens and that of what comes h tokens later give the order by 2 h (Manber and Myers 1993).

    Args:
        tokens: `[n]`.

    Returns:
        `[s]`.
    """
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    reach = 1
    while reach < SORTED_BY:
        later = np.concatenate([ranks[reach:], np.zeros(min(reach, len(ranks)), np.int64)])
        ranks = np.unique(ranks * (ranks.max() + 1) + later, return_inverse=True)[1].astype(np.int64) + 1
        reach *= 2
    order = np.argsort(ranks, kind="stable")
    kind = np.int32 if len(tokens) <= np.iinfo(np.int32).max else np.int64
    return order[tokens[order] != BORDER].astype(kind)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary, alike where all ids mean the same."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _joined(documents: Iterable[Sequence[int]]) -> tuple[np.ndarray, int]:
    """The documents `[n]`, a border after each, and their number."""
    parts: list[np.ndarray] = []
    for number, document in enumerate(documents):
        parts += [_ids_of(document, number), np.array([BORDER], np.int32)]
    return (np.concatenate(parts) if parts else np.empty(0, np.int32)), len(parts) // 2


def _ids_of(document: Sequence[int], number: int) -> np.ndarray:
    """The ids `[n]` of a document. Nothing is rounded, cut or flattened: an id that was bent is of another token."""
    try:
        given = np.asarray(document)
    except ValueError:  # lists of different lengths within it
        given = np.empty((0, 0))
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        what = f"{given.ndim} dimensions" if given.ndim != 1 else f"{given.dtype} such as {given[0]!r}"
        raise ValueError(f"A document must be a list of whole numbers, its token ids; document {number} (from 0) has {what}.")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) <= GREATEST_ID:
        wrong = int(given.min()) if int(given.min()) < 0 else int(given.max())
        raise ValueError(f"Token ids are from 0 to {GREATEST_ID}, and document {number} (from 0) holds {wrong}.")
    return given.astype(np.int32)


def _described(version: Path) -> Description:
    description = json.loads((version / DESCRIPTION).read_text())
    if description["layout"] != LAYOUT:
        raise ValueError(f"The datastore has the layout {description['layout']}, and {LAYOUT} is read; build it anew.")
    return Description(**description)
