"""The multi-token-prediction layers that a checkpoint has beyond those of its model (DeepSeek-V3, arXiv 2412.19437, 2.2).

transformers leaves them out when it loads the model. Its own classes build them and read them from the checkpoint; here they
get a cache with rows of any lengths.

Shapes: B lines, n positions of a pass, h hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .. import compat
from ..cache import FIRST_CAPACITY, Layout, SlotCache, SlotLayer
from ..heads.target_parts import parts_of
from .head_runner import HeadRunner


def load_mtp_layers(target: PreTrainedModel) -> Any:
    """Reads the layers of a target from its checkpoint. Embeddings and output layer stay the target's.

    Raises:
        ValueError: if it has none, or they cannot be read.
    """
    count = getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None)
    if not count:
        raise ValueError(
            f"`mtp` drafts with the multi-token-prediction layers of a checkpoint, and the config of {type(target).__name__} "
            "says of none (`num_mtp_layers`, `num_nextn_predict_layers`); use another drafter."
        )
    if compat.MtpModel is None:
        raise ValueError("`mtp` needs a transformers that builds multi-token-prediction layers, 5.24; this one does not.")
    if not target.config.name_or_path:
        raise ValueError(
            "`mtp` reads the layers from the checkpoint that the model was loaded from, and this one was not loaded "
            "(`config.name_or_path` is empty)."
        )
    # The layers are found by what the model's class leaves out, which names those of the published sizes only.
    named = copy.copy(target)
    first = parts_of(target).layers
    own = [rf"layers\.{number}\." for number in range(first, first + count)]
    named._keys_to_ignore_on_load_unexpected = [*(target._keys_to_ignore_on_load_unexpected or []), *own]
    try:
        model = compat.MtpModel.from_pretrained(named, device_map={"": target.device})
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"The multi-token-prediction layers of {target.config.name_or_path!r} cannot be read: {error}"
        ) from error
    return model.eval()


class MtpStage:
    """One of the layers, which says what comes `index` tokens later than the layer before it does.

    Args:
        model: All of them.
        index: Which.
    """

    def __init__(self, model: Any, index: int):
        self.model = model
        self.index = index
        self.dtype: torch.dtype = model.layers[index].eh_proj.weight.dtype
        self.device: torch.device = model.layers[index].eh_proj.weight.device

    def embedding_table(self) -> Tensor:
        """`[V, h]`."""
        weight: Tensor = self.model.embed_tokens.weight
        return weight

    def advance(self, tokens: Tensor, states: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
        """Hidden states `[B, n, h]` (see `EagleHead.advance`)."""
        model = self.model
        embeddings = model.embed_tokens(tokens).to(states.device)
        turned = None
        if model.rotary_emb is not None:
            layer_type = {"layer_type": model.config.layer_types[self.index]} if model.has_per_layer_rope else {}
            turned = model.rotary_emb(embeddings, position_ids=positions, **layer_type)
        hidden: Tensor = model.layers[self.index](
            embeddings, states, position_embeddings=turned, attention_mask=mask, position_ids=positions, **{compat.CACHE: cache}
        )
        return model.shared_post_norm(hidden) if model.use_shared_post_norm else hidden


class MtpRunner(HeadRunner):
    """A layer with the cache of one call.

    Args:
        stage: The layer.
        batch_size: B.
        tokens: How many slots a row may need.
    """

    def __init__(self, stage: MtpStage, batch_size: int, tokens: int):
        self.head: Any = stage
        self.cache = _empty_cache(stage, batch_size, min(tokens, FIRST_CAPACITY))
        self.written = 0


def _empty_cache(stage: MtpStage, batch_size: int, slots: int) -> SlotCache:
    probe = DynamicCache()
    nothing = torch.zeros(1, 1, dtype=torch.long, device=stage.device)
    states = torch.zeros(1, 1, stage.embedding_table().shape[1], dtype=stage.dtype, device=stage.device)
    stage.advance(nothing, states, None, nothing, probe)  # a pass tells the shapes of keys and values, which may differ
    held = probe.layers[stage.index]
    layout = Layout([0] * batch_size, stage.device)
    keys, values = (part.new_zeros(batch_size, part.shape[1], slots, part.shape[3]) for part in (held.keys, held.values))
    return SlotCache([*probe.layers[: stage.index], SlotLayer(keys, values, layout, None)], layout)
