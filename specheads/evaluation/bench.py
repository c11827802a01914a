"""A target, and the variants that take turns on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from ..heads.download import is_repository_id
from ..mixin import SpeculativeGenerationMixin, enable
from .divergence import divergences
from .prompts import InputError, Prompt, encode
from .runs import Run, timed_run
from .smollm2 import smollm2_folder
from .summary import run_record
from .variants import PLAIN

WARM_UP_TOKENS = 8


@dataclass
class Bench:
    """A target with the variants to compare on it.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        variants: Per name, the arguments of `generate` that make the variant.
        arguments: Those that all share.
        seed: Of sampling.
        models: Per name, what runs the variant where it is not the target itself: a copy with prepacked weights, or another
            library's model.
        drafters: Per name, the drafter that is attached to the target for the variant, where its arguments do not name it.
    """

    model: Any
    tokenizer: Any
    variants: dict[str, dict[str, Any]]
    arguments: dict[str, Any]
    seed: int
    models: dict[str, Any] = field(default_factory=dict)
    drafters: dict[str, Any] = field(default_factory=dict)

    def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Runs every variant for a few tokens, so that none is the first to touch the model.

        Args:
            prompts: Some batch.

        Raises:
            InputError: if a variant is refused.
        """
        for name in self.variants:
            try:
                self.run(name, prompts, self.seed, max_new_tokens=WARM_UP_TOKENS)
            except (ValueError, TypeError, NotImplementedError) as error:
                raise InputError(f"The variant {name} cannot run here: {error}") from error

    def trial(self, number: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Runs every variant on a batch.

        Args:
            number: Of the trial; it decides who goes first.
            prompts: The batch.
        """
        names = list(self.variants)
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        if number // len(names) % 2:
            order.reverse()  # else each would always come after the same one
        runs = {name: self.run(name, prompts, self.seed + number) for name in order}
        records = {name: run_record(runs[name], self._compare(name, prompts, runs)) for name in names}
        return {"category": prompts[0].category, "prompts": [prompt.name for prompt in prompts], "runs": records}

    def run(self, name: str, prompts: Sequence[Prompt], seed: int, **changed: Any) -> Run:
        """Runs a variant on a batch.

        Args:
            name: The variant.
            prompts: The batch.
            seed: Of sampling.
            **changed: Arguments of `generate` that are other than usual.
        """
        model = self.models.get(name, self.model)
        if name in self.drafters:
            enable(model, drafter=self.drafters[name])
        # A variant is what it says, whatever the model's generation config says.
        unless_ours = {"speculative": False} if isinstance(model, SpeculativeGenerationMixin) else {}
        return timed_run(
            model, self.inputs(prompts), seed, **{**unless_ours, **self.variants[name], **self.arguments, **changed}
        )

    def inputs(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """What the target reads of a batch."""
        return {name: ids.to(self.model.device) for name, ids in encode(self.tokenizer, prompts).items()}

    def _compare(self, name: str, prompts: Sequence[Prompt], runs: dict[str, Run]) -> list[Any] | None:
        if name == PLAIN or self.arguments["do_sample"]:
            return None
        return divergences(self.model, self.inputs(prompts), runs[PLAIN], runs[name])


def load_target(name: str | None) -> tuple[Any, Any]:
    """Model and tokenizer by folder or id; SmolLM2 for `None`.

    Raises:
        InputError: if it cannot be loaded.
    """
    check_place(name)
    try:
        folder = name or str(smollm2_folder())
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise InputError(f"The model cannot be loaded: {error}") from error
    return load_model(folder), tokenizer


def load_model(name: str) -> Any:
    """A generative model by folder or id, on the GPU if there is one.

    Raises:
        InputError: if it cannot be loaded.
    """
    check_place(name)
    try:
        is_encoder_decoder = AutoConfig.from_pretrained(name).is_encoder_decoder
        kind: Any = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_pretrained(name)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"The model {name} cannot be loaded: {error}") from error
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def load_draft(name: str) -> tuple[Any, Any]:
    """A draft model, and its tokenizer if there is one beside it; without, vocabularies are compared by their sizes.

    Raises:
        InputError: if the model cannot be loaded.
    """
    model = load_model(name)
    try:
        return model, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return model, None


def check_place(name: str | None) -> None:
    """Says that a folder is not there, which transformers would take for the id of a repository.

    Raises:
        InputError: naming it.
    """
    if name is not None and not Path(name).is_dir() and not is_repository_id(name):
        raise InputError(f"The model {name} cannot be loaded: there is no such folder.")
