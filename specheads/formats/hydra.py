"""Hydra's multi-layer heads, which read the embeddings of the tokens drafted before (Ankner et al. 2024).

    hydra_mlp.{i}.{j}.linear.{weight,bias}              block j of head i; the first reads hidden state and i + 1 embeddings
    hydra_mlp.{i}.0.res_connection.{weight,bias}        the first block's residual path
    hydra_lm_head.{i}.{weight,bias}                     output layer of head i

Blocks after the first are one module, saved once for each place. Its other architectures (an attention layer before the heads)
are refused. Source: zankner/Hydra, `hydra/model/hydra_heads/mlp_head.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedModel

from ..heads import MedusaConfig, MedusaHeads
from ..heads.provenance import describe_target
from ..heads.saving import write_json, write_weights
from .checkpoint import Checkpoint, load_exactly
from .naming import check_base_name

PREFIX = "hydra_head."
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(weight|bias)")
PLAIN = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
NOTES = ("dropout_rate", "model_type")
FILE = "hydra_lm_head.safetensors"


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is Hydra's, by the names of its weights or its config."""
    return "hydra_num_heads" in checkpoint.config or any(BLOCK.fullmatch(n.removeprefix(PREFIX)) for n in checkpoint.weights)


def read(checkpoint: Checkpoint, target: PreTrainedModel) -> MedusaHeads:
    """Reads heads.

    Args:
        checkpoint: The checkpoint.
        target: The target that they are for.

    Raises:
        ValueError: if they are of another architecture, the weights are not complete, or do not fit the target.
    """
    stated = {name: checkpoint.take(name, value) for name, value in PLAIN.items()}
    odd = [f"{name}={value!r}" for name, value in stated.items() if value != PLAIN[name]]
    if odd:
        raise ValueError(f"Of Hydra only its grounded multi-layer heads are read, and {checkpoint.where} has {', '.join(odd)}.")
    for note in NOTES:
        checkpoint.take(note)
    check_base_name(checkpoint.take("base_model_name_or_path"), target)
    config = MedusaConfig.from_target(
        target,
        num_heads=checkpoint.take("hydra_num_heads"),
        num_hidden_layers=checkpoint.take("hydra_num_layers", 1),
        dependence="hydra",
        logit_scale=1.0,
        final_logit_softcapping=None,
        output_bias=any(name.endswith("hydra_lm_head.0.bias") for name in checkpoint.weights),
        base_model=describe_target(target),
    )
    checkpoint.check_config_read()
    heads = MedusaHeads.fresh(config, checkpoint.dtype)
    weights = {_own_name(name.removeprefix(PREFIX)): weight for name, weight in checkpoint.weights.items()}
    load_exactly(heads, weights, checkpoint.where)
    return heads


def write(heads: MedusaHeads, folder: Path) -> None:
    """Writes heads with Hydra's dependence.

    Args:
        heads: The heads; with output layers of their own.
        folder: Where to.

    Raises:
        ValueError: if the layout cannot hold the heads.
    """
    config = heads.config
    is_plain = (config.logit_scale, config.final_logit_softcapping, config.embedding_multiplier) == (1.0, None, 1.0)
    has_more = config.original_lm_head or config.has_own_vocabulary or config.confidence or not is_plain
    if config.dependence != "hydra" or has_more:
        raise ValueError(
            "Hydra's layout holds heads with the dependence 'hydra', output layers of their own, the target's vocabulary, "
            "plain logits and no confidence output."
        )
    write_weights(folder / FILE, {_their_name(name): weight for name, weight in heads.state_dict().items()})
    fields = {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_hidden_layers,
        "base_model_name_or_path": (config.base_model or {}).get("name_or_path"),
    }
    write_json(folder / "config.json", {**fields, **PLAIN})


def _own_name(name: str) -> str:
    if match := BLOCK.fullmatch(name):
        place = f"layers.{match[2]}" if match[3] == "linear" else "residual"
        return f"blocks.{match[1]}.{place}.{match[4]}"
    match = OUTPUT.fullmatch(name)
    return f"lm_heads.{match[1]}.{match[2]}" if match else name


def _their_name(name: str) -> str:
    name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"hydra_mlp.\1.\2.linear.", name)
    name = re.sub(r"^blocks\.(\d+)\.residual\.", r"hydra_mlp.\1.0.res_connection.", name)
    return re.sub(r"^lm_heads\.", "hydra_lm_head.", name)
