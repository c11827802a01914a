"""The draft vocabulary: a head may know only the target's most frequent tokens.

On disk it is two buffers, under the names that engines read (Li et al. 2025, EAGLE-3): `d2t` holds for each draft token how far
the target's id is from its own, `t2d` for each of the target's tokens whether the head knows it.

Shapes: V the target's vocabulary, D the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor


class DraftVocabulary:
    """What heads of a draft vocabulary have in common, whatever they keep it in.

    Attributes:
        vocabulary_field: The field of the config that says how large it is.
    """

    config: Any
    vocabulary_field: ClassVar[str]

    @property
    def draft_ids(self) -> Tensor | None:
        """`[D]` the target's ids of the draft vocabulary; `None` if it is the target's."""
        raise NotImplementedError

    def set_draft_vocabulary(self, ids: Iterable[int] | Tensor) -> None:
        """Sets which of the target's tokens the head knows.

        Args:
            ids: D ids of the target.

        Raises:
            ValueError: if the head has the target's vocabulary, or the ids do not fit.
        """
        if self.draft_ids is None:
            raise ValueError(f"The head has the target's whole vocabulary; make it with a `{self.vocabulary_field}`.")
        self._store_draft_ids(check_ids(ids, self.config.own_vocab_size, self.config.vocab_size).to(self.draft_ids.device))

    def scatter(self, logits: Tensor) -> Tensor:
        """Logits `[..., D]` as logits `[..., V]` over the target's vocabulary, -inf for tokens that the head does not know."""
        ids = self.draft_ids
        return logits if ids is None else scatter_logits(logits, ids, self.config.vocab_size)

    def _store_draft_ids(self, ids: Tensor) -> None:
        """Takes the target's ids `[D]`, increasing."""
        raise NotImplementedError


def offsets_from_ids(ids: Tensor) -> Tensor:
    """`d2t` `[D]` of the target's ids `[D]`."""
    return ids - torch.arange(len(ids), device=ids.device)


def ids_from_offsets(offsets: Tensor) -> Tensor:
    """The target's ids `[D]` of `d2t` `[D]`."""
    return offsets + torch.arange(len(offsets), device=offsets.device)


def known_tokens(ids: Tensor, vocab_size: int) -> Tensor:
    """`t2d` `[V]` bool of the target's ids `[D]`."""
    known = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    known[ids] = True
    return known


def check_ids(ids: Iterable[int] | Tensor, size: int, vocab_size: int) -> Tensor:
    """Checks the target's ids that a draft vocabulary is made of.

    Args:
        ids: The ids, in any order.
        size: D, how many there must be.
        vocab_size: V, which they must be below.

    Returns:
        `[D]` the ids, increasing.

    Raises:
        ValueError: saying what is wrong with them.
    """
    sorted_ids = torch.as_tensor(ids if isinstance(ids, Tensor) else list(ids), dtype=torch.long).sort().values
    fault = None
    if len(sorted_ids) != size:
        fault = f"it has {len(sorted_ids)} tokens and the head {size}"
    elif size and (sorted_ids[0] < 0 or sorted_ids[-1] >= vocab_size):
        fault = f"its ids run from {int(sorted_ids[0])} to {int(sorted_ids[-1])} and the target's from 0 to {vocab_size - 1}"
    elif (sorted_ids[1:] == sorted_ids[:-1]).any():
        fault = "it names a token twice"
    if fault:
        raise ValueError(f"The draft vocabulary does not fit: {fault}.")
    return sorted_ids


def check_maps(offsets: Tensor, known: Tensor) -> None:
    """Checks that the two buffers of a draft vocabulary say the same.

    Args:
        offsets: `[D]` `d2t`.
        known: `[V]` `t2d`.

    Raises:
        ValueError: if they do not; the usual reason is a `d2t` that holds the target's ids themselves.
    """
    ids = ids_from_offsets(offsets)
    if _fit(ids, known):
        return
    if _fit(offsets, known):
        raise ValueError(
            "`d2t` holds the target's ids where offsets belong (id - index); read the head with `specheads.import_head`, which "
            "knows both."
        )
    raise ValueError("`d2t` and `t2d` do not name the same tokens of the target; the head's vocabulary is broken.")


def _fit(ids: Tensor, known: Tensor) -> bool:
    """Whether ids `[D]` are all different and those of `t2d` `[V]`."""
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= len(known):
        return False
    return len(ids.unique()) == len(ids) == int(known.sum()) and bool(known[ids].all())


def scatter_logits(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Logits `[..., D]` of the draft vocabulary as logits `[..., V]` of the target's; -inf where the head knows no token."""
    scattered = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return scattered.index_copy_(-1, ids, logits)
