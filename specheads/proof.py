"""Tries a model type that is not listed: does its forward take what a round asks of it?

A model that follows the usual conventions does what the listed ones do. That is not assumed but tried, once per model, with a
few tokens: nodes of a small tree, in one pass on a filled cache, must get the logits that stock passes over each path give.

Shapes: P tokens of the prompt, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import compat
from .signature import forward_takes

PROMPT = 7
TREE = (0, 0, 1, 2, 3)  # parents: two paths of three and two nodes side by side
CHAIN = (0, 1, 2)
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}

_TRIED: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()


def tried_family(model: PreTrainedModel, candidates: Sequence[Any]) -> Any:
    """The first of some families that a model turns out to be of, `None` if it is of none.

    Args:
        model: A decoder-only model. Its passes are short, and nothing of it is changed.
        candidates: Families, the most capable first.
    """
    if model not in _TRIED:
        fitting = (family for family in candidates if _passes(model, family))
        _TRIED[model] = next(fitting, None) if _can_be_tried(model) else None
    return _TRIED[model]


def _can_be_tried(model: PreTrainedModel) -> bool:
    """Whether a short text tells: a sliding window or a state would show on a long one only."""
    cache = compat.new_cache(model)
    plain = not any(getattr(layer, "is_sliding", False) or hasattr(layer, "conv_states") for layer in cache.layers)
    return plain and not model.config.is_encoder_decoder and not getattr(model, "_is_stateful", False)


@torch.no_grad()
def _passes(model: PreTrainedModel, family: Any) -> bool:
    parents = TREE if family.takes_trees else CHAIN
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocab_size, (2, PROMPT + 1 + len(parents)), generator=generator).to(model.device)
    mask = torch.ones(2, PROMPT, dtype=torch.long, device=model.device)
    mask[0, :2] = 0
    try:
        ours = _in_one_pass(model, family, ids, mask, parents)
        theirs = torch.stack([_along(model, ids, mask, path) for path in _paths(parents)], dim=1)
    except Exception:  # whatever it says, it does not take this
        return False
    scale = theirs.double().std().clamp(min=1e-6)
    return bool(((ours - theirs).double().abs().max() / scale) < TOLERANCE.get(model.dtype, 1e-3))


def _in_one_pass(model: PreTrainedModel, family: Any, ids: Tensor, mask: Tensor, parents: Sequence[int]) -> Tensor:
    """`[2, N + 1, V]` at the root and the nodes."""
    from .target import run_prompt
    from .tree import DraftTree

    tokens = [(row[PROMPT + 1 :], parents) for row in ids.tolist()]
    tree = DraftTree.from_rows(tokens, ids.device)
    runner = run_prompt(model, ids[:, :PROMPT], mask, {}, 16, family)
    return runner.extend(ids[:, PROMPT:], tree.depths, tree.visible).logits


def _along(model: PreTrainedModel, ids: Tensor, mask: Tensor, path: Sequence[int]) -> Tensor:
    """`[2, V]` after the prompt, the root and a path, by a stock pass over all of them, prepared as `generate` does."""
    text = torch.cat([ids[:, :PROMPT], ids[:, PROMPT:][:, [0, *path]]], dim=1)
    whole = torch.cat([mask, mask.new_ones(2, 1 + len(path))], dim=1)
    arguments: dict[str, Any] = {"input_ids": text, "attention_mask": whole, "use_cache": False, "return_dict": True}
    if forward_takes(model, "position_ids"):
        arguments["position_ids"] = (whole.cumsum(dim=1) - 1).clamp(min=0)
    return model(**arguments).logits[:, -1]


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """The nodes from the root's child down to each node, that of the root included."""
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], node])
    return paths
