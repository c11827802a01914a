"""From one tokenizer's ids to another's: which tokens they share, and how a text of the one reads in the other.

Tokens are compared by the bytes that they stand for, whatever the tokenizers write for a space or a byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

LOOK_BEHIND = 32  # tokens at the end of a text that are encoded anew when it has grown, at least
WRITTEN_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """What a tokenizer's ids stand for.

    Args:
        tokenizer: The tokenizer.
        size: More than any id that its model knows.

    Attributes:
        bytes_of: By id, the bytes of every token that is text.
        specials: By id, the names of the others.
    """

    def __init__(self, tokenizer: Any, size: int):
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
        vocabulary = {token: name for name, token in tokenizer.get_vocab().items() if token < size}
        alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else {}
        self.specials = {token: name for token, name in vocabulary.items() if token in special}
        self.bytes_of = {
            token: _written(name, {} if token in added else alphabet)
            for token, name in sorted(vocabulary.items())
            if token not in special
        }

    def encode(self, text: str) -> list[int]:
        """A text's ids, without special tokens around them."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids if text else []

    def bytes(self, tokens: Sequence[int]) -> bytes:
        """What some tokens of text stand for."""
        return b"".join(self.bytes_of[token] for token in tokens)

    def start(self) -> list[int]:
        """The token that the tokenizer puts before every text, if it does so."""
        first = self.tokenizer("").input_ids[:1]
        return first if first and first[0] == self.tokenizer.bos_token_id else []


class Translation:
    """Between the tokenizer of a target and that of its draft model.

    Args:
        tokenizer: The target's.
        draft_tokenizer: The draft model's.
        sizes: More than any id that the target knows, and than any that the draft model does.

    Attributes:
        pairs: The shared tokens: the target's ids and the draft model's, one to one. The tokens that end a text are a pair,
            whatever their names.
    """

    def __init__(self, tokenizer: Any, draft_tokenizer: Any, sizes: tuple[int, int]):
        self.target, self.draft = TokenText(tokenizer, sizes[0]), TokenText(draft_tokenizer, sizes[1])
        self.pairs: dict[int, int] = {}
        for ours, theirs in ((self.target.bytes_of, self.draft.bytes_of), (self.target.specials, self.draft.specials)):
            by_meaning: dict[Any, int] = {}
            for token, meaning in theirs.items():
                by_meaning.setdefault(meaning, token)
            for token, meaning in ours.items():
                if meaning in by_meaning:
                    self.pairs[token] = by_meaning.pop(meaning)
        ends = tokenizer.eos_token_id, draft_tokenizer.eos_token_id
        if None not in ends and ends[0] not in self.pairs and ends[1] not in self.pairs.values():
            self.pairs[ends[0]] = ends[1]
        self.back = {theirs: ours for ours, theirs in self.pairs.items()}

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """A text of the target's as the draft model reads it; special tokens that it does not have are left out."""
        read: list[int] = []
        said: list[int] = []
        for token in tokens:
            if token in self.target.bytes_of:
                said.append(token)
                continue
            read += self._encoded(said)
            said = []
            if token in self.pairs:
                read.append(self.pairs[token])
        return read + self._encoded(said)

    def to_target(self, behind: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What the draft model drafted as the target would say it.

        Both texts are encoded together, so that the draft begins as it does in the middle of a text, and what comes after the
        boundary between them is taken. Where a token spans it, the draft is encoded alone.

        Args:
            behind: The target's tokens before it.
            drafted: The draft model's tokens; what comes after a special one is left out.

        Returns:
            The target's ids.
        """
        spoken = next((place for place, token in enumerate(drafted) if token not in self.draft.bytes_of), len(drafted))
        end = [self.back[token] for token in drafted[spoken : spoken + 1] if token in self.back]
        first = next((place for place in range(len(behind), 0, -1) if behind[place - 1] not in self.target.bytes_of), 0)
        # A character may begin before the first of these tokens, and end after the last drafted one.
        before = self.target.bytes(behind[first:]).lstrip(bytes(range(0x80, 0xC0)))
        text = (before + self.draft.bytes(drafted[:spoken])).decode(errors="ignore")
        left = len(text.encode()) - len(before)
        if left <= 0:
            return end
        found = self.target.encode(text)
        for place in range(len(found) - 1, -1, -1):
            left -= len(self.target.bytes_of.get(found[place], b""))
            if left == 0:
                return found[place:] + end
            if left < 0:
                break
        return self.target.encode(text.encode()[len(before) :].decode(errors="ignore")) + end

    def _encoded(self, said: Sequence[int]) -> list[int]:
        return self.draft.encode(self.target.bytes(said).decode(errors="replace"))


class Reading:
    """A row's text in the draft model's ids, as it grows.

    The last tokens are encoded anew with those that come: what ends a text is encoded otherwise than what goes on.

    Args:
        translation: The translation.
        prompt: The target's ids so far.
    """

    def __init__(self, translation: Translation, prompt: Sequence[int]):
        self.translation = translation
        self.settled = translation.draft.start()
        self.open: list[int] = []
        if self.settled and translation.to_draft(prompt[:1]) == self.settled:
            self.settled = []  # the prompt begins with it
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes more of the target's tokens."""
        self.open += tokens
        if len(self.open) > 2 * LOOK_BEHIND:
            place = self._boundary()
            self.settled += self.translation.to_draft(self.open[:place])
            self.open = self.open[place:]
        read = self.settled + self.translation.to_draft(self.open)
        self.ids = read or [next(iter(self.translation.pairs.values()), 0)]  # a model must read something

    def _boundary(self) -> int:
        """Where a word begins before the last tokens, or else a character."""
        begins = [self.translation.target.bytes_of.get(token, b" ")[:1] for token in self.open[: 1 - LOOK_BEHIND]]
        places = range(len(begins) - 1, 0, -1)
        words = (place for place in places if begins[place].isspace())
        characters = (place for place in places if not b"\x80" <= begins[place] < b"\xc0")
        return next(words, next(characters, 0))


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether a tokenizer writes its tokens in the alphabet of GPT-2, a character for each byte."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in [decoder, *decoder.get("decoders", [])])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters and their bytes: printable ones stand for themselves, the others are numbered from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _written(name: str, alphabet: dict[str, int]) -> bytes:
    """The bytes of a token by its name."""
    if alphabet and all(character in alphabet for character in name):
        return bytes(alphabet[character] for character in name)
    byte = WRITTEN_BYTE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()
