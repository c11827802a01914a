"""Whether the target at hand is the one that a checkpoint names."""

from __future__ import annotations

import os
import warnings

from transformers import PreTrainedModel


def check_base_name(named: str | None, target: PreTrainedModel) -> None:
    """Warns if a checkpoint was made for a model of another name. Folders are not compared: theirs are the user's.

    Args:
        named: What the checkpoint says.
        target: The target at hand.
    """
    own = target.config._name_or_path
    if not named or not own or os.path.exists(own) or os.path.exists(named):
        return
    if named.rsplit("/", 1)[-1].lower() != own.rsplit("/", 1)[-1].lower():
        warnings.warn(
            f"The head says that it was made for {named}, and the target is {own}: if they differ, fewer drafts will hold.",
            stacklevel=5,
        )
