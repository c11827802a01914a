"""The two encodings of `d2t`: how far a draft token's id is from its index, or the id itself.

Shapes: V the target's vocabulary, D the draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..heads import vocabulary

ENCODINGS = ("offsets", "ids")


def read_maps(d2t: Tensor, t2d: Tensor | None, vocab_size: int, encoding: str | None, where: str) -> tuple[Tensor, Tensor]:
    """Both maps of a draft vocabulary as a head holds them.

    Args:
        d2t: `[D]` in either encoding.
        t2d: `[V]` which of the target's tokens are known, if the checkpoint has it.
        vocab_size: V.
        encoding: `"offsets"`, `"ids"`, or `None` to recognise it.
        where: The checkpoint, for messages.

    Returns:
        `d2t` as offsets, and `t2d`.

    Raises:
        ValueError: if no encoding fits, or several do and none was given.
    """
    if encoding not in (None, *ENCODINGS):
        raise ValueError(f"`d2t_encoding` must be one of {', '.join(ENCODINGS)}, got {encoding!r}.")
    readings = {"offsets": vocabulary.ids_from_offsets(d2t), "ids": d2t}
    known = None if t2d is None else t2d.bool()
    fitting = [name for name, ids in readings.items() if _fits(ids, known, vocab_size)]
    if encoding is not None and encoding not in fitting:
        hint = f"; it holds {fitting[0]}" if fitting else ""
        raise ValueError(f"`d2t` of {where} does not hold {encoding} into a vocabulary of {vocab_size}{hint}.")
    if not fitting:
        raise ValueError(
            f"`d2t` of {where} is neither offsets nor ids into a vocabulary of {vocab_size} that `t2d` agrees with: it was "
            "made for another vocabulary, or is damaged."
        )
    if encoding is None and len(fitting) > 1 and not torch.equal(readings["offsets"], readings["ids"]):
        raise ValueError(
            f"`d2t` of {where} can be read as offsets and as ids, and there is no `t2d` to tell: pass `d2t_encoding='offsets'` "
            "or 'ids'."
        )
    ids = readings[encoding or fitting[0]]
    return vocabulary.offsets_from_ids(ids), vocabulary.known_tokens(ids, vocab_size)


def _fits(ids: Tensor, known: Tensor | None, vocab_size: int) -> bool:
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        return False
    return known is None or (len(known) == vocab_size and int(known.sum()) == len(ids) and bool(known[ids].all()))
