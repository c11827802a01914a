"""Generated text on a terminal as it appears, and how it came about in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..evaluation.colouring import ACCEPTED, OWN, REJECTED, Pieces

if TYPE_CHECKING:
    from rich.console import Console

    from ..rounds import DraftRound
    from .session import Reply

LEGEND = (
    f"[{ACCEPTED}]accepted drafts[/], [{OWN}]the target's own tokens[/]",
    f"[{ACCEPTED}]accepted drafts[/], [{OWN}]the target's own tokens[/], [{REJECTED}]rejected drafts[/]",
)


class RoundPrinter:
    """A streamer that prints each round in colours: accepted drafts, rejected ones if asked for, the target's own token.

    Args:
        tokenizer: Decodes the tokens.
        console: Where to print.
        show_drafts: Whether to print rejected drafts, if the console is a terminal.
    """

    def __init__(self, tokenizer: Any, console: Console, show_drafts: bool = False):
        self.tokenizer, self.console = tokenizer, console
        self.show_drafts = show_drafts and console.is_terminal  # without colours they would read as text
        self.text = Pieces(tokenizer)

    def put(self, value: Any) -> None:
        """Tokens come with their round."""

    def put_round(self, rounds: Mapping[int, DraftRound]) -> None:
        """Prints the round of the one row that there is."""
        for a_round in rounds.values():
            accepted, own = self._split(a_round.emitted, len(a_round.accepted))
            self._write(accepted, ACCEPTED)
            if self.show_drafts:
                self._write(self._rejected(a_round), REJECTED)
            self._write(own, OWN)

    def end(self) -> None:
        """Prints what is left of an unfinished character."""
        self._write(self.text.rest(), OWN)
        self.console.print()

    def _split(self, emitted: list[int], accepted: int) -> tuple[str, str]:
        parts = [self.text.add(token) for token in emitted]
        return "".join(parts[:accepted]), "".join(parts[accepted:])

    def _rejected(self, a_round: DraftRound) -> str:
        """The path of drafts that leaves the accepted one, first children first."""
        node, tokens = (a_round.accepted or [0])[-1], []
        while node in a_round.parents:
            node = a_round.parents.index(node) + 1
            tokens.append(a_round.tokens[node - 1])
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _write(self, text: str, style: str) -> None:
        from rich.text import Text

        if text:
            self.console.print(Text(text, style if self.console.is_terminal else ""), end="", soft_wrap=True)


def statistics_line(reply: Reply) -> str:
    """What a reply took, in one line."""
    stats = reply.speculation
    words = [
        f"{len(reply.tokens)} tokens in {reply.seconds:.1f} s",
        f"{len(reply.tokens) / reply.seconds:.1f} tokens/s",
        f"{stats.num_spec_steps} rounds",
        f"mean acceptance length {stats.mean_acceptance_length:.2f}",
    ]
    if stats.num_draft_tokens:
        words.append(
            f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafted tokens accepted "
            f"({stats.draft_acceptance_rate:.0%})"
        )
    return " · ".join(words)
