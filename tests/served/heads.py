"""The heads that are served, as files: what each is, and how vLLM is asked to serve it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import specheads
from specheads.heads import DraftHead, EagleHead, MedusaHeads

VOCABULARY = range(1, 2048, 4)  # a small one, so that files are small


@dataclass
class Served:
    """A head in a folder.

    Args:
        method: vLLM's name for its kind.
        draft_tokens: K.
        head: The head.
        folder: Its files.
    """

    method: str
    draft_tokens: int
    head: DraftHead
    folder: Path

    def speculative_config(self) -> dict[str, Any]:
        return {"method": self.method, "model": str(self.folder), "num_speculative_tokens": self.draft_tokens}


class Maker:
    """Makes heads of a target in a folder.

    Args:
        target: The target.
        folder: Where to.
    """

    def __init__(self, target: PreTrainedModel, folder: Path):
        self.target, self.folder = target, folder

    def saved(self, name: str, head: DraftHead, method: str, draft_tokens: int = 3, format: str | None = None) -> Served:
        """A head saved with `save_pretrained`, or exported in a format."""
        folder = self.folder / name
        if format is None:
            head.save_pretrained(folder)
        else:
            specheads.export_head(head, folder, format=format)
        return Served(method, draft_tokens, head, folder)

    def changed(self, name: str, served: Served, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Served:
        """Another's files after a change of their config and weights; the head is still the one before."""
        folder = self.folder / name
        shutil.copytree(served.folder, folder)
        config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        change(config, weights)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return Served(served.method, served.draft_tokens, served.head, folder)

    def eagle(self, version: int = 3, **fields: Any) -> EagleHead:
        """A head with random weights."""
        if version == 3:
            fields.setdefault("draft_tokens", VOCABULARY)
        return random(EagleHead.from_target(self.target, version=version, **fields))

    def medusa(self, **fields: Any) -> MedusaHeads:
        """Heads with random weights, three of them that share an output layer."""
        settings = {"num_heads": 3, "original_lm_head": True}
        return random(MedusaHeads.from_target(self.target, **{**settings, **fields}))


@torch.no_grad()
def random(head: Any) -> Any:
    """The head with weights under which everything in it counts; its output layers stay close to the target's."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in head.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "lm_head" in name:
            weight.add_(0.02 * noise)
        elif "embed_tokens" in name:
            weight.add_(weight.std() * noise)
        elif weight.dim() > 1:
            weight.copy_(noise / weight.shape[1] ** 0.5)
        else:
            weight.copy_(0.3 * noise + (1 if "norm" in name else 0))
    return head.eval()
