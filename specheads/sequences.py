"""What has been said: the ids of every row, the stop rules, and the streamer.

Rows advance by different numbers of tokens, but every rule is asked token by token, as plain `generate` would ask it, with the
ids that it would show for that row: the padded prompt and the continuation, all `[R, L]` of one width L.

Shapes: B rows of the whole batch, P prompt width, L width of a row's ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

from .tree import NO_LAW

# Room is taken at once for this many tokens, then in doubling steps.
FIRST_ROOM = 4096
KNOWN_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria, EosTokenCriteria)


class Sequences:
    """The ids of a batch and when each row stops.

    Args:
        prompt: `[B, P]` ids as `generate` prepared them, padding included.
        criteria: The call's stopping criteria.
        max_length: The width at which every row has stopped.
        pad_token: What fills a row after its end; `None` if no row can end early.
        streamer: Receives each position of the continuation once all rows have it, as `[B]`.
    """

    def __init__(
        self, prompt: Tensor, criteria: StoppingCriteriaList, max_length: int, pad_token: Tensor | None, streamer: Any = None
    ):
        self.batch_size, self.prompt_width = prompt.shape
        self.max_length = max_length
        self.pad_token = 0 if pad_token is None else int(pad_token)
        self.known_ids = _widened(prompt, min(max_length, self.prompt_width + FIRST_ROOM), self.pad_token)
        self.continuations: list[list[int]] = [[] for _ in range(self.batch_size)]
        self.widths = [self.prompt_width] * self.batch_size
        self.known_widths = list(self.widths)
        self.finished = [False] * self.batch_size
        self.criteria = criteria
        self.has_unknown_criteria = any(type(criterion) not in KNOWN_CRITERIA for criterion in criteria)
        self.end_tokens: set[int] = set()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.end_tokens.update(criterion.eos_token_id.flatten().tolist())
        # Plain decoding pads ended rows if they can end by a token; else it goes on with them until the last one has ended.
        self.pads_ended = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        goes_on = not self.pads_ended and any(type(criterion) is StopStringCriteria for criterion in criteria)
        self.needs_step = self.batch_size > 1 and (self.has_unknown_criteria or goes_on)
        self.streamer = streamer
        self.streamed = 0

    @property
    def ids(self) -> Tensor:
        """`[B, L]` of all rows, with room behind them; what is new is sent to the device at once, and only when asked for."""
        new = [row for row in range(self.batch_size) if self.known_widths[row] < self.widths[row]]
        if not new:
            return self.known_ids
        room, widest = self.known_ids.shape[1], max(self.widths)
        if widest > room:
            self.known_ids = _widened(self.known_ids, min(self.max_length, max(2 * room, widest)), self.pad_token)
        places = [(row, column) for row in new for column in range(self.known_widths[row], self.widths[row])]
        tokens = [self.continuations[row][column - self.prompt_width] for row, column in places]
        rows, columns, values = torch.tensor([*zip(*places, strict=True), tokens]).to(self.known_ids.device)
        self.known_ids[rows, columns] = values.to(self.known_ids.dtype)
        self.known_widths = list(self.widths)
        return self.known_ids

    def remaining(self, row: int) -> int:
        """How many tokens the row may still get."""
        return self.max_length - self.widths[row]

    def generated(self, row: int) -> int:
        """How many tokens the row has got."""
        return len(self.continuations[row])

    def is_padded(self, row: int) -> bool:
        """Whether the row gets nothing but padding from now on."""
        return self.finished[row] and self.pads_ended

    def unfinished(self) -> list[int]:
        """The rows that go on, in order."""
        return [row for row in range(self.batch_size) if not self.finished[row]]

    def prefixes(self, rows: Sequence[int], drafted: Tensor) -> Tensor:
        """The ids `[R, L + D]` of rows of one width, followed by drafted tokens `[R, D]` if there are any."""
        width = max(self.widths[row] for row in rows)
        whole = len(rows) == self.batch_size and list(rows) == list(range(self.batch_size))
        ids = self.ids[:, :width] if whole else self.ids[list(rows), :width]
        return torch.cat([ids, drafted], dim=1) if drafted.numel() else ids

    def append(self, rows: Sequence[int], emitted: Sequence[Sequence[int]], in_step: bool) -> list[list[int]]:
        """Adds a round's tokens, each row up to where it stops.

        Args:
            rows: The rows that emitted.
            emitted: Their tokens.
            in_step: Keep all rows at one width: they get as many tokens as the shortest of them, ended ones too, until the
                last one ends.

        Returns:
            What each row got.
        """
        kept: list[list[int]] = [[] for _ in rows]
        for index in count():
            going = [line for line, row in enumerate(rows) if not self.finished[row]]
            if in_step and going:
                going = list(range(len(rows)))
            ready = [line for line in going if index < len(emitted[line])]
            if not ready or (in_step and len(ready) < len(going)):
                break
            for line in ready:
                kept[line].append(emitted[line][index])
            ended = sum(self.finished)
            self._extend([rows[line] for line in ready], [emitted[line][index] for line in ready])
            if in_step and sum(self.finished) > ended:
                break  # what a row emits after its end is not what was drafted for it
        self._stream()
        return kept

    def _extend(self, rows: list[int], tokens: list[int]) -> None:
        """Adds one token to each of some rows and asks the stop rules about them."""
        if NO_LAW in tokens:
            raise ValueError(
                f"The model gives row {rows[tokens.index(NO_LAW)]} no token to sample: its scores are NaN or all "
                "-inf after the logits processors. Check the model's precision and the constraints."
            )
        for row, token in zip(rows, tokens, strict=True):
            self.widths[row] += 1
            self.continuations[row].append(token)
        if self.has_unknown_criteria:
            # Asked as plain `generate` asks: once a step, about the whole batch, ended rows padded to its width.
            width = max(self.widths)
            ids = self.ids[:, :width].contiguous()
            stopped = torch.zeros(self.batch_size, dtype=torch.bool, device=ids.device) | self.criteria(ids, None)
            for row in rows:
                self.finished[row] = self.finished[row] or bool(stopped[row])
            return
        for row, token in zip(rows, tokens, strict=True):
            self.finished[row] = self.finished[row] or token in self.end_tokens or self.widths[row] >= self.max_length
        for criterion in self.criteria:
            if type(criterion) in (StopStringCriteria, MaxTimeCriteria):
                self._ask(criterion, rows)

    def _ask(self, criterion: Any, rows: list[int]) -> None:
        by_width: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            by_width[self.widths[row]].append(row)
        for width, same in by_width.items():
            for row, stopped in zip(same, criterion(self.ids[same, :width], None).tolist(), strict=True):
                self.finished[row] = self.finished[row] or stopped

    def _stream(self) -> None:
        if self.streamer is None:
            return
        going = self.unfinished()
        complete = min(map(self.generated, going)) if going else max(map(self.generated, range(self.batch_size)))
        for index in range(self.streamed, complete):
            column = [row[index] if index < len(row) else self.pad_token for row in self.continuations]
            self.streamer.put(torch.tensor(column))
        self.streamed = max(self.streamed, complete)

    def result(self) -> Tensor:
        """`[B, L]` all ids, ended rows padded to the longest one."""
        return self.ids[:, : max(self.widths)].clone()


def _widened(ids: Tensor, width: int, fill: int) -> Tensor:
    """Ids `[B, L]` with room for `width` of them."""
    wide = ids.new_full((ids.shape[0], width), fill)
    wide[:, : ids.shape[1]] = ids
    return wide
