"""A chat template, and where the replies stand in what it renders.

A reply is what the model writes when it is served: it begins where the rendering of the messages before it, with the generation
prompt, ends, and it ends with the token that ends its turn. That holds for any template, however often a text is repeated.
Templates that render earlier replies otherwise than the last one (most that have a place for reasoning take it out
of earlier ones) are rendered once per reply, as a server would. Where a template cannot be taken apart like that, its own
`{% generation %}` marks count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from ..evaluation.prompts import InputError
from .conversations import Chat, Message

QUESTION, REPLY = "a question", "one reply"


@dataclass(frozen=True)
class Rendered:
    """A text and where the replies stand in it.

    Args:
        text: The text.
        replies: Per reply, where it begins and ends in the text, counted in characters; its end token is within.
        end: How many characters of the last reply are its end token.
    """

    text: str
    replies: tuple[tuple[int, int], ...]
    end: int = 0

    def without_end(self) -> Rendered:
        """The same, for a last reply that was cut: its writer did not write the end."""
        start, stop = self.replies[-1]
        return Rendered(self.text, (*self.replies[:-1], (start, stop - self.end)))


class ChatFormat:
    """The chat template of a tokenizer, with its arguments.

    Args:
        tokenizer: With a chat template.
        arguments: Further arguments of the template, for instance `{"enable_thinking": False}`.

    Attributes:
        opening: What stands between a question and its reply.
        end: The tokens that end a reply, as text; empty if there are none.
        lead: What the template itself puts before the text of a reply that has nothing else, an empty thought for instance.
            It is not learned, unless it is made of special tokens or white space, which the model writes.

    Raises:
        InputError: if there is no template, or if it cannot render a question and its reply.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None):
        if not tokenizer.chat_template:
            raise InputError(
                f"The tokenizer {_name(tokenizer)} has no chat template, which chats need: set `tokenizer.chat_template`, "
                "or give the data as `prompt` with `completion`, or `text`."
            )
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self.takes_parts = False
        question, reply = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": REPLY}
        self.takes_parts = not self._renders(question)
        asked = self.render([question], None, "The chat template", add_generation_prompt=True)
        answered = self.render([question, reply], None, "The chat template")
        if QUESTION not in asked or REPLY not in answered:
            raise InputError("The chat template does not render messages as they are, so replies cannot be found in its texts.")
        self.opening = asked[asked.rfind(QUESTION) + len(QUESTION) :]
        self._find_end(answered, self.render([question, reply, question], None, "The chat template"))
        lead = answered[len(asked) : answered.rfind(REPLY)] if answered.startswith(asked) else ""
        self.lead = lead if lead.strip() and not self._special_tokens(lead) else ""

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, place: str, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation.

        Raises:
            InputError: if the template refuses it.
        """
        try:
            return self.tokenizer.apply_chat_template(
                self._shown(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.arguments,
            )
        except (TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise InputError(
                f"{place}: the chat template cannot render a conversation of {roles or 'nothing'}: {error}"
            ) from error

    def rendered(self, chat: Chat, place: str) -> Iterator[Rendered]:
        """The texts that a conversation is learned from: one with all replies, or one per reply where the template asks for it.

        Raises:
            InputError: if there is no reply, or if the template renders a reply otherwise than it asks for it.
        """
        places = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not places:
            roles = ", ".join(message["role"] for message in chat.messages)
            raise InputError(f"{place}: there is no reply to learn from: the roles are {roles}, and none is `assistant`.")
        written = chat.written or ("",) * len(places)
        if len(written) != len(places):
            raise InputError(
                f"{place}: `written` has {len(written)} entries for {len(places)} replies; it must have one for each."
            )
        *before, last = self._texts(chat, places, written, place)
        yield from before
        yield last.without_end() if chat.is_cut else last

    def has_asked(self, text: str) -> bool:
        """Whether a text was rendered by this template up to where a reply begins."""
        return bool(self.opening.strip()) and text.endswith(self.opening)

    def in_text(self, text: str) -> Rendered | None:
        """The replies in a text that was rendered before; `None` if it was not rendered by this template."""
        if not self.opening.strip():
            return None
        replies, start = [], text.find(self.opening)
        while start >= 0:
            start += len(self.opening)
            found = text.find(self.end, start) if self.end else text.find(self.opening, start)
            stop = len(text) if found < 0 else found + len(self.end)
            replies.append((start, stop))
            start = -1 if found < 0 else text.find(self.opening, found)
        return self.with_replies(text, replies) if replies else None

    def with_replies(self, text: str, replies: Sequence[tuple[int, int]]) -> Rendered:
        """A text and its replies, each from the generation prompt to its end."""
        begun = [(start + len(self.lead) * text.startswith(self.lead, start), stop) for start, stop in replies]
        start, stop = begun[-1]
        has_end = bool(self.end) and text.endswith(self.end, start, stop)
        return Rendered(text, tuple(begun), len(self.end) if has_end else 0)

    def _texts(self, chat: Chat, places: list[int], written: tuple[str, ...], place: str) -> list[Rendered]:
        whole = None if any(written) else self._at_once(chat, places, place)
        if whole is not None:
            return [whole]
        singles = [self._single(chat, number, text, place) for number, text in zip(places, written, strict=True)]
        if all(single is not None for single in singles):
            return [single for single in singles if single is not None]
        return [self._marked(chat, places, place)]

    def _at_once(self, chat: Chat, places: list[int], place: str) -> Rendered | None:
        """All replies in one text, if each stands there after just what it was asked with."""
        text, replies = self.render(chat.messages[: places[-1] + 1], chat.tools, place), []
        for number in places:
            asked, answered = self._asked(chat, number, place), self._answered(chat, number, place)
            text = answered if len(answered) > len(text) else text  # by an end that the template leaves out
            stop = self._stop(answered, len(asked))
            if not (text.startswith(answered[:stop]) and answered.startswith(asked)):
                return None
            replies.append((len(asked), stop))
        return self.with_replies(text, replies)

    def _single(self, chat: Chat, number: int, written: str, place: str) -> Rendered | None:
        """One reply after what it was asked with, if it stands there."""
        asked = self._asked(chat, number, place)
        answered = asked + written + self.end if written else self._answered(chat, number, place)
        if not answered.startswith(asked):
            return None
        return self.with_replies(answered, [(len(asked), self._stop(answered, len(asked)))])

    def _marked(self, chat: Chat, places: list[int], place: str) -> Rendered:
        """All replies in one text, where the template itself marks them with `{% generation %}`."""
        messages = chat.messages[: places[-1] + 1]
        text = self.render(messages, chat.tools, place)
        if not re.search(r"{%-?\s*generation\s*-?%}", str(self.tokenizer.chat_template)):
            asked = self._asked(chat, places[-1], place)
            raise InputError(
                f"{place}: the chat template asks for a reply with {asked[-60:]!r}, but then renders "
                f"{text[_common(text, asked) :][:60]!r}, so that what the model writes cannot be told from what it is given. "
                "Give the template arguments that the replies were written under (`enable_thinking` for instance), a template "
                "that marks replies with {% generation %}, or data of `train/generate.py`, which keeps replies as written."
            )
        marked = self.tokenizer.apply_chat_template(
            self._shown(messages),
            tools=chat.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
            **self.arguments,
        )
        spans = _runs(marked["assistant_masks"], marked["offset_mapping"])
        if not spans:
            raise InputError(f"{place}: the chat template marks no reply with {{% generation %}} in this conversation.")
        return self.with_replies(
            text, [(start, stop + len(self.end) * text.startswith(self.end, stop)) for start, stop in spans]
        )

    def _asked(self, chat: Chat, number: int, place: str) -> str:
        return self.render(chat.messages[:number], chat.tools, place, add_generation_prompt=True)

    def _answered(self, chat: Chat, number: int, place: str) -> str:
        text = self.render(chat.messages[: number + 1], chat.tools, place)
        return text if self.writes_end else text + self.end

    def _stop(self, text: str, start: int) -> int:
        """Where a reply ends in a text that ends with it: after it a template may write more."""
        found = text.rfind(self.end, start) if self.end else -1
        if found < 0:
            return len(text)
        # Some end the whole conversation with the same token again.
        while (shorter := text[start:found].rstrip()).endswith(self.end):
            found = start + len(shorter) - len(self.end)
        return found + len(self.end)

    def _find_end(self, answered: str, continued: str) -> None:
        """What ends a reply, from a text that ends with one and from one that goes on.

        Some templates write no end token: the model says the one that begins the next message instead.
        """
        last, middle = (self._special_tokens(text[text.rfind(REPLY) + len(REPLY) :]) for text in (answered, continued))
        self.writes_end = bool(last)
        if last:
            both = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, middle, strict=False))]
            self.end = "".join(both or last)
        else:
            self.end = middle[0] if middle else ""

    def _special_tokens(self, text: str) -> list[str]:
        """The first special tokens in a text that stand side by side."""
        added = self.tokenizer.added_tokens_decoder.values()
        tokens = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        # The longest first, should one begin like another.
        single = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token)
        found = re.search(f"(?:{single})+", text) if single else None
        return re.findall(single, found.group()) if found else []

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        if not self.takes_parts:
            return list(messages)
        return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]

    def _renders(self, question: Message) -> bool:
        """Whether the template renders contents that are strings; those with pictures may want lists of parts."""
        try:
            return QUESTION in self.render([question], None, "")
        except InputError:
            return False


def _runs(mask: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where the runs of marked tokens begin and end in the text."""
    runs: list[tuple[int, int]] = []
    was_marked = False
    for is_marked, (start, stop) in zip(mask, spans, strict=True):
        if is_marked and was_marked:
            runs[-1] = (runs[-1][0], stop)
        elif is_marked:
            runs.append((start, stop))
        was_marked = bool(is_marked)
    return runs


def _common(text: str, other: str) -> int:
    return next((place for place, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
