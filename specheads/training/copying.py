"""Attention heads that start as copiers: they look up where the text had the token at hand, and bring what came after it there.

A place of an EAGLE-3 head holds a token beside the target's features of the token before it. So queries made of the token,
keys made of the features and values made of the token are an induction head (Olsson et al. 2022, arXiv 2209.11895) within one
layer. Training finds it late if it begins elsewhere, so some heads are made to begin there: all their maps are fitted by least
squares to some texts.

Shapes: P places, h the head's hidden size, d the size of an attention head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..evaluation.prompts import InputError
from ..heads import DraftHead, EagleHead
from ..heads.layers import PairLayer
from .laws import DraftVocabulary
from .teacher import Teacher

PLACES = 16_384  # how many are fitted to
# Rotary positions must not tell places apart that are so far from each other, in tokens: queries and keys keep to pairs of
# dimensions that turn by less than a radian in between.
REACH = 300
# What a match counts in attention, as a factor on the whitened embeddings' products, and what is brought, as a share of the
# residual stream: of 0.7 of it a trained head was much worse before it had learned to use it.
SHARPNESS = 6.0
STRENGTH = 0.3
JITTER = 0.02  # so that the query heads of a group do not stay the same
RIDGE = 1e-3


def start_copying(head: DraftHead, teacher: Teacher, texts: Iterable[Any], groups: int) -> None:
    """Makes some attention heads of a fresh head begin as copiers.

    Args:
        head: A head of one layer, bound to its target; the heads that share its last key heads are overwritten.
        teacher: The target.
        texts: Batches of texts to fit to; taken until there are enough.
        groups: How many key heads, each with the query heads that share it.

    Raises:
        InputError: if the head is of another kind, has no more key heads, or its rotary positions leave no room.
    """
    count, slow = key_heads(head), _slow_pairs(head)
    if groups > count:
        raise InputError(f"The head has {count} key heads; set `copying_groups` to that at most, got {groups}.")
    eagle = cast(EagleHead, head)
    attention: Any = eagle.layers[0].self_attn
    ratio, size = attention.num_key_value_groups, attention.head_dim
    maps = _Maps(eagle, Places.of(eagle, teacher, texts))
    with torch.no_grad():
        for group in range(groups):
            queries, keys = maps.matching(group, slow, size)
            values, outputs = maps.bringing(group, size)
            shared, own = (slice((count - 1 - group) * rows, (count - group) * rows) for rows in (size, ratio * size))
            attention.q_proj.weight[own] = _jittered(queries.repeat(ratio, 1)).to(attention.q_proj.weight)
            attention.k_proj.weight[shared] = keys.to(attention.k_proj.weight)
            attention.v_proj.weight[shared] = values.to(attention.v_proj.weight)
            attention.o_proj.weight[:, own] = (outputs / ratio).repeat(1, ratio).to(attention.o_proj.weight)


def key_heads(head: DraftHead) -> int:
    """How many key heads a head has that could begin as copiers.

    Raises:
        InputError: if its attention is not of the kind that can.
    """
    layer = head.layers[0] if isinstance(head, EagleHead) and len(head.layers) == 1 else None
    if not isinstance(layer, PairLayer) or hasattr(layer.self_attn, "q_norm"):
        raise InputError(
            "Copying heads are for EAGLE-3 heads of one layer whose attention does not normalise queries and keys; set "
            "`copying_groups` to 0."
        )
    _slow_pairs(head)
    return layer.self_attn.k_proj.out_features // layer.self_attn.head_dim


@dataclass
class Places:
    """What copying heads are fitted to.

    Args:
        keys: `[P, h]` what the layer's attention reads of the features.
        tokens: `[P, h]` what it reads of the embedding of the token whose features these are.
        ids: `[P]` those tokens.
        is_first: `[P]` whether the text begins there.
        first: `[h]` what it reads of a text's second token, the token of the place where the text begins.
        residual: How long the hidden states are, their median.
    """

    keys: Tensor
    tokens: Tensor
    ids: Tensor
    is_first: Tensor
    first: Tensor
    residual: float

    @classmethod
    @torch.no_grad()
    def of(cls, head: EagleHead, teacher: Teacher, texts: Iterable[Any]) -> Places:
        """Those of some batches of texts, `PLACES` at most."""
        layer = cast(PairLayer, head.layers[0])
        keys, ids, firsts, lengths, second = [], [], [], [], []
        for batch in texts:
            given = teacher(batch)
            fused = head.fuse(given.features)
            exists = batch.attention_mask.bool()
            begins = exists & ~batch.continues
            keys.append(layer.hidden_norm(fused)[exists].float())
            lengths.append(fused[exists].float().norm(dim=-1))
            ids.append(batch.input_ids[exists])
            firsts.append(begins[exists])
            second.append(batch.input_ids[:, 1:][begins[:, :-1] & batch.continues[:, 1:]])
            if sum(map(len, ids)) >= PLACES:
                break
        if not ids:
            raise InputError("There is no text to fit copying heads to; give training data, or set `copying_groups` to 0.")
        all_ids = torch.cat(ids)

        def read(tokens: Tensor) -> Tensor:
            return layer.input_layernorm(head.embed(tokens)).float()

        residual = float(torch.cat(lengths).median())
        return cls(torch.cat(keys), read(all_ids), all_ids, torch.cat(firsts), read(torch.cat(second)).mean(0), residual)


class _Maps:
    """The maps of copying heads.

    Args:
        head: The head as it was.
        places: What they are fitted to.
    """

    def __init__(self, head: EagleHead, places: Places):
        self.places, size = places, places.tokens.shape[-1]
        # Tokens are compared by their whitened embeddings, in the directions that the features tell best.
        values, vectors = torch.linalg.eigh(places.tokens.T @ places.tokens / len(places.tokens))
        white = vectors * (values + 3e-3 * values.max()).rsqrt() @ vectors.T
        told = _least_squares(places.keys, places.tokens @ white)
        best = torch.linalg.eigh(told.T @ (places.keys.T @ places.keys) @ told).eigenvectors.flip(1)
        self.of_token, self.of_features = white @ best, told @ best
        is_first = places.is_first[:, None].float()
        self.begins = _least_squares(places.keys, is_first)[:, 0]
        self.constant = _least_squares(places.tokens, torch.ones_like(is_first))[:, 0]
        # What is brought points to where the output layer has the token.
        known = head.lm_head.weight.float() * head.norm.weight.float()
        index = DraftVocabulary(head.draft_ids, head.config.vocab_size).index(places.ids)
        rows = nn.functional.normalize(known[index.clamp(min=0)], dim=-1)[index >= 0]
        wanted = _least_squares(places.tokens[index >= 0], rows - rows.mean(0))
        self.towards = torch.linalg.svd(places.tokens[index >= 0] @ wanted, full_matrices=False).Vh
        self.wanted, self.size = wanted, size

    def matching(self, group: int, slow: list[int], size: int) -> tuple[Tensor, Tensor]:
        """The weights `[d, 2 h]` of the queries and the keys of a group.

        Args:
            group: Which one.
            slow: Pairs of dimensions that positions hardly turn, the slowest last.
            size: d.
        """
        *pairs, rest = slow
        dimensions = [*pairs, *(pair + size // 2 for pair in pairs)]
        chosen = slice(group * len(dimensions), (group + 1) * len(dimensions))
        of_token, of_features = self.of_token[:, chosen], self.of_features[:, chosen]
        queries, keys = self.constant.new_zeros(2, size, 2 * self.size)
        count = of_token.shape[1]  # fewer if the directions are used up
        queries[dimensions[:count], : self.size] = of_token.T * SHARPNESS**0.5
        keys[dimensions[:count], self.size :] = of_features.T * SHARPNESS**0.5
        # Where nothing matches, the beginning of the text is looked at, from where nothing is brought.
        match = ((self.places.tokens @ of_token) * (self.places.keys @ of_features)).sum(-1).median().clamp(min=0)
        level = (0.5 * SHARPNESS * match).sqrt()
        queries[rest, : self.size] = self.constant * level
        keys[rest, self.size :] = self.begins * level
        return queries, keys

    def bringing(self, group: int, size: int) -> tuple[Tensor, Tensor]:
        """The weights `[d, 2 h]` of a group's values, and `[h, d]` of what becomes of them."""
        towards = self.towards[group * size : (group + 1) * size].T
        values = towards.new_zeros(size, 2 * self.size)
        brought = (self.wanted @ towards).T
        values[: len(brought), : self.size] = brought
        values[: len(brought), self.size :] = -torch.outer(brought @ self.places.first, self.begins)
        outputs = towards.new_zeros(self.size, size)
        outputs[:, : len(brought)] = towards * STRENGTH * self.places.residual
        return values, outputs


def _slow_pairs(head: DraftHead) -> list[int]:
    """The pairs of dimensions that positions turn by less than a radian within `REACH` tokens, the slowest last."""
    frequencies = cast(Tensor, cast(EagleHead, head).rotary_emb.inv_freq)
    slow = (frequencies * REACH < 1).nonzero()[:, 0].tolist()
    if len(slow) < 2:
        raise InputError(
            f"The target's rotary positions turn all dimensions within {REACH} tokens, which leaves none to match tokens by; "
            "set `copying_groups` to 0."
        )
    return sorted(slow, key=lambda pair: -float(frequencies[pair]))


def _least_squares(given: Tensor, wanted: Tensor) -> Tensor:
    """The matrix that takes `given` `[P, a]` nearest to `wanted` `[P, b]`, with a ridge."""
    square = given.T @ given
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    return torch.linalg.solve(square, given.T @ wanted)


def _jittered(weights: Tensor) -> Tensor:
    return weights * (1 + JITTER * torch.randn_like(weights))
