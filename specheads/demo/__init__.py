"""A demonstration on a small real model: `python -m specheads.demo`.

Plain `generate` and `generate(..., speculative=True)` take turns on a few prompts, greedy and sampled, one at a time and in a
batch of four. The speculative text is shown with the accepted draft tokens marked, and a table compares the two.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..drafters import load_drafter
from ..evaluation.colouring import accepted_marks, pieces
from ..evaluation.divergence import Divergence, divergences
from ..evaluation.prompts import Prompt, encode
from ..evaluation.runs import Run, sampling_arguments, timed_run
from ..evaluation.smollm2 import load_smollm2
from ..evaluation.table import show_table
from ..formats.description import check_head
from ..mixin import enable

if TYPE_CHECKING:  # rich is imported where it is used: without it, the demonstration says what to install
    from rich.console import Console
    from rich.text import Text

DEFAULT = "auto"
HEADS_FOLDER = Path(__file__).parent
TIMES = (
    "About three minutes on two cores: plain generate and speculative=True take turns. The first time it is more: `make demo` "
    "installs its packages, which takes a few minutes, and SmolLM2-135M-Instruct is converted, which takes about one."
)
MAX_NEW_TOKENS = 80
SEED = 7
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}

PROMPTS = {
    "chat": "Give me three tips for learning a new language as an adult.",
    "summary": """\
Summarize the following text in three sentences.

The harbour bridge will close for repairs on 3 March and will stay closed for six weeks. During this time, buses 12 and 14 will
use the northern tunnel, and the ferry between the old town and the docks will run every ten minutes instead of every twenty.
The city council expects the repairs to cost 2.4 million euros, half of which the state will pay. Shop owners near the bridge
have asked the council for compensation, because they expect to lose customers while the bridge is closed. The council will
decide on their request at its meeting on 18 February.""",
    "code": """\
Add a method `is_empty` to this class and write out the whole class.

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
```""",
    "letter": "Write a short letter to a friend who is moving to another city.",
}

COLUMNS = ("prompt", "drafter", "way", "plain tok/s", "spec. tok/s", "ratio", "τ", "greedy tokens")
CAPTION = (
    "tok/s: tokens per second of plain generate and of speculative=True. τ, the mean acceptance length: emitted tokens / "
    "rounds, where a round is one pass of the target. greedy tokens: where the two differ, the first token that does, and the "
    "gap between the target's scores of the two choices. In a batch all prompts are generated at once, and tokens are counted "
    "together; on a CPU drafts pay little there. Each line is one run of either: its ratio is of these prompts only."
)


@dataclass
class Pair:
    """The two runs of one line of the table.

    Args:
        name: Of the prompt or the batch.
        prompts: Keys of `PROMPTS`, one per row.
        way: `"greedy"` or `"sampled"`.
        drafter: What drafted.
        plain: The run of plain `generate`.
        speculative: The run with `speculative=True`.
        divergences: The rows in which a greedy pair differs; `None` for a sampled one.
    """

    name: str
    prompts: Sequence[str]
    way: str
    drafter: str
    plain: Run
    speculative: Run
    divergences: list[Divergence] | None


class Demo:
    """The model with its tokenizer, and the pairs of runs so far.

    Args:
        model: The target, enabled.
        tokenizer: Its tokenizer.
        console: Where to print.
    """

    def __init__(self, model: Any, tokenizer: Any, console: Console):
        self.model, self.tokenizer, self.console = model, tokenizer, console
        self.pairs: list[Pair] = []

    def warm_up(self) -> None:
        """A few tokens of either kind, so that neither is the first to touch the model."""
        for speculative in (False, True):
            self._run(["chat"], "greedy", speculative, max_new_tokens=8)

    def compare(self, name: str, prompts: Sequence[str], way: str, drafter: str = DEFAULT) -> None:
        """Generates both ways and prints the speculative text; who goes first alternates.

        Args:
            name: For the table.
            prompts: Keys of `PROMPTS`; several are one batch.
            way: `"greedy"` or `"sampled"`.
            drafter: What is attached to the model.
        """
        self.console.rule(f"{name}, {way}, {drafter}", align="left", characters="-")
        order = (False, True) if len(self.pairs) % 2 == 0 else (True, False)
        runs = {speculative: self._watched(prompts, way, speculative) for speculative in order}
        plain, speculative = runs[False], runs[True]
        differences = divergences(self.model, self._inputs(prompts), plain, speculative) if way == "greedy" else None
        pair = Pair(name, prompts, way, drafter, plain, speculative, differences)
        self.pairs.append(pair)
        self._show_texts(pair)

    def show_table(self) -> None:
        """Prints the comparison."""
        show_table("Plain generate and speculative=True", COLUMNS, [_cells(pair) for pair in self.pairs], CAPTION)

    def _show_texts(self, pair: Pair) -> None:
        stats = pair.speculative.speculation
        for name, tokens, row in zip(pair.prompts, pair.speculative.rows, stats.rows, strict=True):
            self._show_prompt(name)
            self.console.print(self._marked(tokens, accepted_marks(row.per_step_accepted, len(tokens))))

    def _show_prompt(self, name: str) -> None:
        """As much of a prompt as goes into one line."""
        from rich.text import Text

        prompt = Text.assemble((f"{name}: ", "bold"), (" ".join(PROMPTS[name].split()), "dim"))
        self.console.print(prompt, no_wrap=True, overflow="ellipsis")

    def _marked(self, tokens: Sequence[int], accepted: Sequence[bool]) -> Text:
        """The text, accepted draft tokens green and the target's own underlined blue; marks where colours are missing."""
        from rich.text import Text

        has_colour = self.console.is_terminal
        text = Text()
        for mark, group in groupby(zip(accepted, pieces(self.tokenizer, tokens), strict=True), key=itemgetter(0)):
            part = "".join(piece for _, piece in group)
            text.append(f"⟨{part}⟩" if mark and not has_colour else part, "green" if mark else "underline blue")
        return text

    def _watched(self, prompts: Sequence[str], way: str, speculative: bool) -> Run:
        """A run, with what is running in a live line; not a count of tokens, which a streamer would slow the run for."""
        words = "speculative=True" if speculative else "plain generate"
        if not self.console.is_terminal:
            self.console.print(f"Running {words} …")
            return self._run(prompts, way, speculative)
        with self.console.status(f"{words}: up to {MAX_NEW_TOKENS * len(prompts)} tokens"):
            return self._run(prompts, way, speculative)

    def _run(self, prompts: Sequence[str], way: str, speculative: bool, **changed: int) -> Run:
        arguments: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, **sampling_arguments(TEMPERATURES[way]), **changed}
        if speculative:
            arguments["speculative"] = {"per_step": True}
        return timed_run(self.model, self._inputs(prompts), SEED, **arguments)

    def _inputs(self, names: Sequence[str]) -> Any:
        prompts = [Prompt(name, "demo", ({"role": "user", "content": PROMPTS[name]},)) for name in names]
        return encode(self.tokenizer, prompts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demonstration, which has no options but `--help`. Returns the exit status."""
    ArgumentParser(prog="specheads.demo", description=__doc__).parse_args(arguments)
    if find_spec("rich") is None:
        print('The demonstration prints with rich: run `pip install "specheads[demo]"`.', file=sys.stderr)
        return 1
    console = _console()
    console.print(TIMES)
    try:
        model, tokenizer = load_smollm2()
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    # Both sides of the comparison run on the packed weights.
    enable(model, pack_for_cpu=model.device.type == "cpu")
    run_all(Demo(model, tokenizer, console), load_heads(model, tokenizer))
    return 0


def demo_heads() -> list[Path]:
    """The folders of the heads that are shipped for the demonstration, each with a `config.json`."""
    return sorted(config.parent for config in HEADS_FOLDER.glob("*/config.json"))


def load_heads(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The shipped heads that are for this target, by the names of their folders.

    Args:
        model: The target.
        tokenizer: Its tokenizer.

    Raises:
        ValueError: if a head is damaged.
    """
    heads = {}
    for folder in demo_heads():
        if check_head(folder, model, tokenizer).fits:
            heads[folder.name] = load_drafter(folder, model, tokenizer)
    return heads


def _console() -> Console:
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character that the model writes
    return Console(highlight=False)


def run_all(demo: Demo, heads: Mapping[str, Any] | None = None) -> None:
    """All prompts, both ways of choosing tokens, alone and in a batch, each head on all prompts, and the table.

    Args:
        demo: The model and where to print.
        heads: Drafters of heads, by name.
    """
    if demo.console.is_terminal:
        demo.console.print("[green]green[/]: accepted draft tokens; [underline blue]underlined blue[/]: the target's own.")
    else:
        demo.console.print("In ⟨ ⟩: accepted draft tokens; the others are the target's own.")
    demo.warm_up()
    for way in TEMPERATURES:
        for name in PROMPTS:
            demo.compare(name, [name], way)
    for way in TEMPERATURES:
        demo.compare(f"batch of {len(PROMPTS)}", list(PROMPTS), way)
    for head, drafter in (heads or {}).items():
        enable(demo.model, drafter=drafter)
        for way in TEMPERATURES:
            for name in PROMPTS:
                demo.compare(name, [name], way, head)
    demo.show_table()


def _cells(pair: Pair) -> list[str]:
    plain, speculative = pair.plain.tokens_per_second, pair.speculative.tokens_per_second
    mean_length = pair.speculative.speculation.mean_acceptance_length
    figures = [f"{plain:.1f}", f"{speculative:.1f}", f"{speculative / plain:.2f}", f"{mean_length:.2f}"]
    return [pair.name, pair.drafter, pair.way, *figures, _identity(pair.divergences)]


def _identity(divergences: Sequence[Divergence] | None) -> str:
    if divergences is None:
        return ""
    if not divergences:
        return "identical"
    first = divergences[0]
    gap = "one text ended" if first.gap is None else f"gap {first.gap:.1e}"
    return f"differ at {first.position}, {gap}"
