"""Heads to train: fresh ones that start from what the target knows, or trained ones to go on with.

Medusa heads start as the target's next-token law (`MedusaHeads.warm_start`). An EAGLE head's layer starts as the target's last
one where the shapes allow it: it reads what that layer reads, and its output goes into a copy of the same output layer.

Shapes: h the head's hidden size, t the target's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..evaluation.prompts import InputError
from ..heads import DraftHead, EagleConfig, EagleHead, MedusaConfig, MedusaHeads
from ..heads.layers import PairLayer
from ..heads.target_parts import parts_of
from .arguments import HeadArguments

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def make_head(
    arguments: HeadArguments, target: PreTrainedModel, tokenizer: Any, draft_tokens: Tensor | None, depth: int
) -> DraftHead:
    """The head that training starts from, in single precision, bound to its target.

    Args:
        arguments: What it is to be.
        target: Its target.
        tokenizer: The target's tokenizer.
        draft_tokens: `[D]` the target's ids that it is to know; `None` for all.
        depth: How many tokens a draft has in training.

    Raises:
        InputError: if the settings do not fit the target.
    """
    try:
        config = _config(arguments, target, tokenizer, draft_tokens, depth)
        kind = MedusaHeads if arguments.head == "medusa" else EagleHead
        head: Any = kind.fresh(config, torch.float, target.device)
        head.bind(target, tokenizer, arguments.model_revision)
        if draft_tokens is not None:
            head.set_draft_vocabulary(draft_tokens)
        if arguments.warm_start:
            warm_start(head, target)
    except ValueError as error:
        raise InputError(str(error)) from error
    return head


def trained_head(name_or_path: str, target: PreTrainedModel, tokenizer: Any) -> DraftHead:
    """A head to go on training with, in single precision.

    Args:
        name_or_path: Its folder or Hub id, in any format that `import_head` reads.
        target: Its target.
        tokenizer: The target's tokenizer.

    Raises:
        InputError: if it cannot be read or does not fit the target.
    """
    from ..formats import import_head

    try:
        found: Any = import_head(name_or_path, target)
        head: DraftHead = type(found).fresh(found.config, torch.float, target.device)
        head.load_state_dict(found.state_dict())
        head.bind(target, tokenizer)
    except (ValueError, OSError) as error:
        raise InputError(f"The head {name_or_path} cannot be trained on: {error}") from error
    return head


def warm_start(head: DraftHead, target: PreTrainedModel) -> None:
    """Gives a fresh head what it can take from its target.

    Args:
        head: The head.
        target: The target.
    """
    cast(Any, head).warm_start(target)
    if isinstance(head, EagleHead):
        _take_last_layer(head, target)


def _config(
    arguments: HeadArguments, target: PreTrainedModel, tokenizer: Any, draft_tokens: Tensor | None, depth: int
) -> EagleConfig | MedusaConfig:
    given = {"tokenizer": tokenizer, "revision": arguments.model_revision, "confidence": arguments.confidence}
    size = None if draft_tokens is None else len(draft_tokens)
    fields = cast(dict[str, Any], arguments.head_fields)
    if arguments.head == "medusa":
        if depth > arguments.num_heads:
            raise InputError(
                f"{arguments.num_heads} heads draft as many tokens; lower `depth` from {depth}, or have more heads."
            )
        own = {"num_hidden_layers": arguments.num_hidden_layers, "dependence": arguments.dependence}
        own |= {"markov_rank": arguments.markov_rank, "truncated_vocab_size": size}
        return MedusaConfig.from_target(target, num_heads=arguments.num_heads, **{**given, **own, **fields})
    version = 3 if arguments.head == "eagle3" else 1
    layers = {"num_hidden_layers": arguments.num_hidden_layers, **fields.get("transformer_layer_config", {})}
    return EagleConfig.from_target(
        target, version, draft_vocab_size=size, **{**given, **fields, "transformer_layer_config": layers}
    )


@torch.no_grad()
def _take_last_layer(head: EagleHead, target: PreTrainedModel) -> None:
    """Copies the target's last decoder layer and final norm, weight by weight where shapes and names agree."""
    theirs = _last_layer(target)
    if theirs is None or parts_of(target).hidden_size != head.config.hidden_size:
        return
    own = head.layers[-1]
    weights = dict(theirs.named_parameters())
    for name, parameter in own.named_parameters():
        found = weights.get(name)
        if found is not None and found.shape == parameter.shape:
            parameter.copy_(found)
    if isinstance(own, PairLayer):
        _take_projections(own, weights)
    if head.config.eagle_version == 3:
        _take_norm(head.norm, _final_norm(target))
        _read_the_highest(head)


def _take_projections(layer: PairLayer, weights: dict[str, nn.Parameter]) -> None:
    """The half of the projections that reads the hidden state, and its norm; the embeddings' half starts fresh."""
    size = layer.hidden_norm.weight.shape[0]
    for name in PROJECTIONS:
        found, wide = weights.get(f"self_attn.{name}.weight"), getattr(layer.self_attn, name).weight
        if found is not None and found.shape == wide[:, size:].shape:
            wide[:, size:] = found
    norm = weights.get("input_layernorm.weight")
    if norm is not None and norm.shape == layer.hidden_norm.weight.shape:
        layer.hidden_norm.weight.copy_(norm)
        layer.input_layernorm.weight.fill_(1.0)


def _read_the_highest(head: EagleHead) -> None:
    """Makes the fused feature that of the highest layer at first."""
    size, count = head.config.hidden_size, len(head.config.feature_layers)
    if head.fc.weight.shape[1] == size * count and not head.config.norm_before_fc and not head.config.fc_norm:
        head.fc.weight[:, size * (count - 1) :] += torch.eye(size).to(head.fc.weight)


def _take_norm(own: Any, theirs: nn.Module | None) -> None:
    weight = getattr(theirs, "weight", None)
    if isinstance(weight, Tensor) and weight.shape == own.weight.shape:
        own.weight.copy_(weight)


def _last_layer(target: PreTrainedModel) -> nn.Module | None:
    """The target's last decoder layer: of its longest list of modules, the last."""
    lists = [module for module in target.modules() if isinstance(module, nn.ModuleList) and len(module)]
    count = parts_of(target).layers
    return next((layers[-1] for layers in lists if len(layers) == count), None)


def _final_norm(target: PreTrainedModel) -> nn.Module | None:
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    norm = getattr(decoder, "norm", None)
    return norm if isinstance(norm, nn.Module) else None
