"""Other libraries, where they are installed: the target as they run it, behind a `generate` that can be timed like its own."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..mixin import SpeculativeGenerationMixin, disable
from .prompts import InputError
from .variants import Variant

# Drafted tokens and the one that the target adds: what `economize` takes if nothing is said.
ECONOMIZE_CYCLE = 4


class EconomizeLookup:
    """Prompt lookup of `economize`, through its `decode`: greedy text of one prompt.

    Args:
        target: The target; what is run is a copy of it without this library.
        draft_tokens: The most tokens of a draft; `None` leaves it to the library.

    Raises:
        InputError: if the library is not installed, or cannot run the target.
    """

    def __init__(self, target: Any, draft_tokens: int | None = None) -> None:
        try:
            import economize
            from economize.techniques.lookup import LookupConfig
        except ImportError as error:
            raise InputError(f"It needs the library economize, which cannot be imported: {error}.") from error
        own = copy.deepcopy(target)
        if isinstance(own, SpeculativeGenerationMixin):
            disable(own)
        self.config = own.config
        self.generation_config = own.generation_config
        self._decoding = economize.DecodeConfig(cycle_length=ECONOMIZE_CYCLE if draft_tokens is None else draft_tokens + 1)
        try:
            self._model = economize.apply(own, LookupConfig())
        except economize.EconomizeError as error:
            raise InputError(f"The library economize cannot run this target: {error}") from error

    def generate(self, input_ids: Tensor, max_new_tokens: int, **arguments: Any) -> Any:
        """Generates greedily.

        Args:
            input_ids: The prompt, `[1, N]`.
            max_new_tokens: The most tokens.
            **arguments: `do_sample=False` and others that change nothing for one prompt.

        Returns:
            An object with `sequences`, `[1, N + L]`.

        Raises:
            ValueError: if it is to sample.
        """
        if arguments.get("do_sample"):
            raise ValueError("it is compared on greedy text only; use --temperature 0.")
        ends = self.generation_config.eos_token_id
        result = self._model.decode(input_ids[0], max_new_tokens, decoding=self._decoding, stop=ends)
        return SimpleNamespace(sequences=torch.cat((input_ids[0], result.tokens.to(input_ids.device)))[None])


def load_peer(variant: Variant, target: Any, draft_tokens: int | None) -> Any:
    """The target as the library of a variant runs it.

    Args:
        variant: One of another library.
        target: The target.
        draft_tokens: K, where the variant's name does not say it.

    Raises:
        InputError: if it cannot be had.
    """
    try:
        return EconomizeLookup(target, int(variant.argument or 0) or draft_tokens)
    except InputError as error:
        raise InputError(f"The variant {variant.name} cannot be measured. {error}") from error
