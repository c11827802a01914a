"""Rows of a dataset as token ids, and which of them the assistant wrote.

Shapes: T tokens of an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from ..evaluation.prompts import InputError
from .chat_format import ChatFormat, Rendered
from .conversations import Chat, Completion, Text, read_row

Example = dict[str, list[Any]]


class Encoder:
    """Makes training examples of rows.

    A text is tokenised as a whole, but for this: where a token would reach over the beginning of a reply, the text is cut
    there, since a served model is given the tokens of the prompt alone.

    Args:
        tokenizer: A fast one.
        template_arguments: Further arguments of its chat template.
        max_length: T at most; what comes later is cut off.

    Raises:
        InputError: if the tokenizer cannot say where its tokens stand in a text, or if its chat template is of no use.
    """

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None, max_length: int | None = None):
        if not tokenizer.is_fast:
            raise InputError(
                f"The tokenizer {type(tokenizer).__name__} does not say where its tokens stand in a text, which it takes to "
                "find the replies; load a fast one."
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.format = ChatFormat(tokenizer, template_arguments) if tokenizer.chat_template else None
        if self.format is None and template_arguments:
            raise InputError(
                f"Template arguments {dict(template_arguments)} were given, and the tokenizer has no chat template."
            )

    def examples(self, row: Mapping[str, Any], place: str) -> Iterator[Example]:
        """The examples of a row.

        Args:
            row: As `read_row` takes it.
            place: What to call the row in an error.

        Yields:
            `input_ids` `[T]` and `loss_mask` `[T]`, true at the tokens that the assistant wrote, the end of the reply included;
            both empty if all of those lie beyond `max_length`.

        Raises:
            InputError: if the row cannot be read, or holds nothing that the assistant wrote.
        """
        match read_row(row, place):
            case Chat() as chat:
                yield from (self._encode(rendered, place) for rendered in self._format(place).rendered(chat, place))
            case Completion() as pair if self.format is None or self.format.has_asked(pair.prompt):
                yield self._plain(pair.prompt, pair.completion, pair.is_cut, place)
            case Completion(prompt, completion, is_cut):
                turns = {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}
                yield from (
                    self._encode(text, place) for text in self._format(place).rendered(Chat(turns, None, (), is_cut), place)
                )
            case Text(text, is_cut):
                rendered = None if self.format is None else self.format.in_text(text)
                if rendered is None:
                    yield self._plain("", text, is_cut, place)
                else:
                    yield self._encode(rendered.without_end() if is_cut else rendered, place)

    def _format(self, place: str) -> ChatFormat:
        if self.format is None:
            raise InputError(f"{place}: a conversation needs a chat template, and the tokenizer has none.")
        return self.format

    def _plain(self, prompt: str, completion: str, is_cut: bool, place: str) -> Example:
        """A prompt and its completion as they are, ended by the end token unless the completion was cut."""
        is_rendered = bool(prompt) and self.format is not None
        end = self.format.end if is_rendered and self.format is not None else self.tokenizer.eos_token or ""
        text = prompt + completion + ("" if is_cut or completion.endswith(end) else end)
        replies = [(len(prompt), len(text))]
        if is_rendered and self.format is not None:
            return self._encode(self.format.with_replies(text, replies), place)
        return self._encode(Rendered(text, tuple(replies)), place, add_special_tokens=True)

    def _encode(self, rendered: Rendered, place: str, add_special_tokens: bool = False) -> Example:
        ids, spans = self._tokenise(rendered.text, [], add_special_tokens)
        cuts = [begin for begin, _ in rendered.replies if any(start < begin < stop for start, stop in spans)]
        if cuts:
            ids, spans = self._tokenise(rendered.text, cuts, add_special_tokens)
        mask = [
            stop > start and any(start < last and stop > first for first, last in rendered.replies) for start, stop in spans
        ]
        if not any(mask):
            raise InputError(f"{place}: there is nothing to learn from: its replies are empty.")
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        return {"input_ids": ids, "loss_mask": mask} if any(mask) else {"input_ids": [], "loss_mask": []}

    def _tokenise(self, text: str, cuts: list[int], add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, and where they stand in it; cut at some places, over which no token reaches."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for begin, end in pairwise([0, *cuts, len(text)]):
            # A template writes the special tokens itself.
            first = add_special_tokens and begin == 0
            encoded = self.tokenizer(text[begin:end], add_special_tokens=first, return_offsets_mapping=True)
            ids += encoded["input_ids"]
            spans += [(start + begin, stop + begin) for start, stop in encoded["offset_mapping"]]
        return ids, spans
