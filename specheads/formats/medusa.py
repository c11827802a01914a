"""Medusa's own layout, which TGI and ModelOpt share.

Version 1 has residual blocks and an output layer for each head, version 2 the blocks only, with the target's output layer. A
full checkpoint holds the same weights under a prefix beside those of the (fine-tuned) target.

    {i}.{j}.linear.{weight,bias}    block j of head i, j < L
    {i}.{L}.weight                  output layer of head i, version 1

Sources: FasterDecoding/Medusa, TGI's `layers/medusa.py`, ModelOpt's Medusa plugin.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..heads import MedusaConfig, MedusaHeads
from ..heads.provenance import describe_target
from ..heads.saving import write_json, write_weights
from ..heads.target_parts import parts_of
from .checkpoint import Checkpoint, load_exactly
from .naming import check_base_name

PREFIXES = ("medusa_heads.", "medusa_head.", "")
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
BACKBONE = ("model.", "lm_head.")
HARMLESS = frozenset({"medusa_num_heads", "num_medusa_heads", "medusa_choices", "version"})
FILE = "medusa_lm_head.safetensors"


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of this layout: it has residual blocks under numbers."""
    return any(BLOCK.fullmatch(name.removeprefix(prefix)) for prefix in PREFIXES for name in checkpoint.weights)


def read(checkpoint: Checkpoint, target: PreTrainedModel) -> MedusaHeads:
    """Reads heads of versions 1 and 2, full checkpoints and ModelOpt's.

    Args:
        checkpoint: The checkpoint.
        target: The target that the heads are for.

    Raises:
        ValueError: if the weights are not complete, or do not fit the target.
    """
    weights, backbone = _split(checkpoint)
    heads, blocks = _count(weights, checkpoint.where)
    has_outputs = any(OUTPUT.fullmatch(name) for name in weights)
    plain: dict[str, Any] = {"logit_scale": 1.0, "final_logit_softcapping": None} if has_outputs else {}
    config = MedusaConfig.from_target(
        target,
        num_heads=heads,
        num_hidden_layers=blocks,
        medusa_fc_bias=any(name.endswith(".bias") for name in weights),
        original_lm_head=not has_outputs,
        # Version 1 has plain output layers of its own; version 2 takes the target's, with all that the target does after it.
        output_bias=not has_outputs and parts_of(target).output_bias is not None,
        **plain,
        base_model=describe_target(target),
    )
    check_base_name(checkpoint.take("base_model_name_or_path"), target)
    _check_config(checkpoint, blocks, bool(backbone))
    _check_backbone(backbone, target, checkpoint.where)
    own = {_own_name(name, blocks): weight for name, weight in weights.items()}
    if not has_outputs:
        own |= _target_output(target, checkpoint.dtype)
    model = MedusaHeads.fresh(config, checkpoint.dtype)
    load_exactly(model, own, checkpoint.where)
    return model


def write(heads: MedusaHeads, folder: Path, version: str = "1") -> None:
    """Writes heads in this layout.

    Args:
        heads: The heads; with biases in their blocks, without own vocabulary, sequential dependence or output biases.
        folder: Where to.
        version: `"1"` with output layers, or `"2"` without: the target's is used then.

    Raises:
        ValueError: if the layout cannot hold the heads.
    """
    config = heads.config
    _refuse_beyond_layout(heads)
    if version == "1":
        _refuse_beyond_version_1(heads)
    elif not config.original_lm_head or not heads.shares_output():
        raise ValueError(
            "Medusa version 2 has the target's output layer, and these heads have their own; export them as version 1."
        )
    weights = {}
    for name, weight in heads.state_dict().items():
        match = re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name)
        if match:
            weights[f"{match[1]}.{match[2]}.linear.{match[3]}"] = weight
    if version == "1":
        for index in range(config.num_heads):
            output = heads.lm_head if config.original_lm_head else heads.lm_heads[index]
            weights[f"{index}.{config.num_hidden_layers}.weight"] = output.weight
    write_weights(folder / FILE, weights)
    fields: dict[str, Any] = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_hidden_layers,
        "base_model_name_or_path": (config.base_model or {}).get("name_or_path"),
        "version": version,
    }
    # No `architectures`: with it TGI takes the folder for a model of its own.
    write_json(folder / "config.json", fields)


def _refuse_beyond_layout(heads: MedusaHeads) -> None:
    config = heads.config
    found = {
        "no biases in their blocks": not config.medusa_fc_bias,
        "a vocabulary of their own": config.has_own_vocabulary,
        f"the sequential dependence {config.dependence!r}": config.dependence != "none",
        "a confidence output": config.confidence,
    }
    _refuse(found)


def _refuse_beyond_version_1(heads: MedusaHeads) -> None:
    config = heads.config
    _refuse({
        "biases in their output layers": config.output_bias,
        "scaled or bounded logits": (config.logit_scale, config.final_logit_softcapping) != (1.0, None),
    })  # fmt: skip


def _refuse(found: dict[str, bool]) -> None:
    beyond = [what for what, there in found.items() if there]
    if beyond:
        raise ValueError(f"Medusa's layout has no place for heads with {', '.join(beyond)}; save them with `save_pretrained`.")


def _split(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The heads' weights without their prefix, and the target's own in a full checkpoint."""
    names = checkpoint.weights
    prefix = next(prefix for prefix in PREFIXES if any(BLOCK.fullmatch(name.removeprefix(prefix)) for name in names))
    heads, backbone = {}, {}
    for name, weight in names.items():
        if prefix and name.startswith(BACKBONE):
            backbone[name] = weight
        else:
            heads[name.removeprefix(prefix)] = weight
    return heads, backbone


def _count(weights: dict[str, Tensor], where: str) -> tuple[int, int]:
    """How many heads and blocks there are."""
    places = [(int(match[1]), int(match[2])) for name in weights if (match := BLOCK.fullmatch(name))]
    heads, blocks = {place[0] for place in places}, {place[1] for place in places}
    for what, found in (("heads", heads), ("blocks", blocks)):
        if found != set(range(len(found))):
            raise ValueError(f"The weights in {where} have {what} {sorted(found)}, some are missing between.")
    return len(heads), len(blocks)


def _check_config(checkpoint: Checkpoint, blocks: int, is_full: bool) -> None:
    # The number of heads in published configs is not to be relied on; the weights say it.
    settings = checkpoint.take("medusa", {}) or {}
    stated = checkpoint.take("medusa_num_layers", settings.get("num_medusa_layers", blocks))
    if stated != blocks:
        raise ValueError(f"The config of {checkpoint.where} says {stated} blocks for each head, and the weights have {blocks}.")
    if is_full:
        checkpoint.read |= set(checkpoint.config)  # the rest of a full checkpoint's config is the target's
    checkpoint.take_all(HARMLESS)
    checkpoint.check_config_read()


def _check_backbone(backbone: dict[str, Tensor], target: PreTrainedModel, where: str) -> None:
    """Refuses heads of a fine-tuned target for another one: a full checkpoint is its own target."""
    own = target.state_dict()
    other = [
        name
        for name, weight in backbone.items()
        if name in own and (weight.shape != own[name].shape or not torch.equal(weight.to(own[name].dtype), own[name].cpu()))
    ]
    if other:
        warnings.warn(
            f"{where} holds a fine-tuned target whose weights are not those of the target at hand ({other[0]} and "
            f"{len(other) - 1} more): load the target from there too, or fewer drafts will be accepted.",
            stacklevel=4,
        )


def _own_name(name: str, blocks: int) -> str:
    if match := BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    match = OUTPUT.fullmatch(name)
    return f"lm_heads.{match[1]}.weight" if match and int(match[2]) == blocks else name


def _target_output(target: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    parts = parts_of(target)
    weights = {"lm_head.weight": parts.output_weight.detach().to("cpu", dtype)}
    if parts.output_bias is not None:
        weights["lm_head.bias"] = parts.output_bias.detach().to("cpu", dtype)
    return weights
