"""`specheads chat`: several turns, the reply appearing as it is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import options

if TYPE_CHECKING:
    from rich.console import Console

    from .session import Session

COMMANDS = {
    "/reset": "begins anew",
    "/quit": "ends the chat, as Ctrl-D does",
    "/help": "lists the commands",
}


@options.for_sessions(max_new_tokens=512)
def chat(
    settings: dict[str, Any],
    system: options.System = None,
    show_drafts: options.ShowDrafts = False,
) -> None:
    """Chat with a model.

    Accepted drafts are green, the target's own tokens underlined blue. Ctrl-C ends a reply only.
    """
    from rich.console import Console

    from .session import Session, Settings

    console = Console(highlight=False)
    console.print("Loading the model …", style="dim")
    session = Session(Settings(**settings))
    Chat(session, console, system, show_drafts).run(lambda: console.input("[bold]> [/]"))


class Chat:
    """The turns of a chat.

    Args:
        session: The target.
        console: Where to print.
        system: The system message.
        show_drafts: Whether to print rejected drafts.
    """

    def __init__(self, session: Session, console: Console, system: str | None = None, show_drafts: bool = False):
        self.session, self.console, self.show_drafts = session, console, show_drafts
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)

    def run(self, read: Callable[[], str]) -> None:
        """Takes turns until the user ends them.

        Args:
            read: Gives the next line of the user.
        """
        from .terminal import LEGEND

        self.console.print(LEGEND[self.show_drafts])
        self.show_help()
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:  # at the prompt it drops the line
                self.console.print()
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self.obey(line)
            elif line:
                self.turn(line)

    def obey(self, command: str) -> None:
        """Carries out a command."""
        if command == "/reset":
            self.messages = list(self.opening)
            self.session.forget()
            self.console.print("The chat begins anew.", style="dim")
            return
        if command != "/help":
            self.console.print(f"There is no command {command}.", style="dim", markup=False)
        self.show_help()

    def show_help(self) -> None:
        """Lists the commands."""
        words = "; ".join(f"{name} {what}" for name, what in COMMANDS.items())
        self.console.print(f"{words}. Ctrl-C ends a reply.", style="dim")

    def turn(self, line: str) -> None:
        """One message and its reply; what an interrupted reply had said stays said."""
        from .terminal import RoundPrinter, statistics_line

        self.messages.append({"role": "user", "content": line})
        printer = RoundPrinter(self.session.tokenizer, self.console, self.show_drafts)
        try:
            reply = self.session.reply(self.messages, printer)
        except KeyboardInterrupt:
            self.session.forget()
            self.console.print("\n(ended)", style="dim")
            self.messages.append({"role": "assistant", "content": printer.text.shown})
            return
        except ValueError as error:  # for instance a chat that has grown beyond the model's positions
            self.messages.pop()
            self.session.forget()
            self.console.print(f"{error}", style="red", markup=False)
            return
        self.messages.append({"role": "assistant", "content": reply.text})
        self.console.print(statistics_line(reply), style="dim", soft_wrap=True)
