"""What a kind of head is, for those who read its model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_ENGINE = "No engine is known to serve heads of this kind; they are used with `specheads`."


@dataclass(frozen=True)
class HeadFacts:
    """What a config says of its head in words.

    Args:
        kind: What it is.
        tags: The kind's names, as tags on the Hub.
        literature: Where the kind is described.
        vllm: What vLLM's `--speculative-config` needs besides the model, for heads that it reads as they are saved.
        engines: For others, a sentence on engines.
    """

    kind: str
    tags: tuple[str, ...] = ()
    literature: tuple[str, ...] = ()
    vllm: Mapping[str, Any] | None = None
    engines: str = NO_ENGINE
