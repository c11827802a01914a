"""A target that is ready to generate, and its cache from one turn of a chat to the next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from .. import compat
from ..evaluation.bench import load_model, load_target
from ..evaluation.prompts import InputError, Prompt, encode
from ..evaluation.runs import continuations, sampling_arguments
from ..mixin import enable

DTYPES = ("float32", "float64", "bfloat16", "float16")
Messages = Sequence[dict[str, str]]


@dataclass
class Settings:
    """What the options of a command say.

    Args:
        model: Folder or Hub id of the target; `None` for SmolLM2.
        drafter: A drafter's name, or the folder or Hub id of a head.
        draft_model: Folder or Hub id of a draft model, in place of it.
        max_new_tokens: The most tokens of a reply.
        temperature: 0 is greedy.
        top_p: Of sampling.
        top_k: Of sampling; 0 for all tokens.
        seed: Of sampling.
        draft_tokens: The most tokens along a path.
        tree_nodes: The most nodes of a draft tree.
        pack_for_cpu: Whether the target's weights are prepacked.
        dtype: The target's precision.
        device: Where it is.
        threads: Of torch.
    """

    model: str | None = None
    drafter: str | None = None
    draft_model: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    draft_tokens: int | None = None
    tree_nodes: int | None = None
    pack_for_cpu: bool = False
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None


@dataclass
class Reply:
    """What one call of `generate` gave.

    Args:
        tokens: The ids of the continuation, up to and with the one that ended it.
        text: The same as text.
        seconds: How long it took.
        speculation: Its statistics.
    """

    tokens: list[int]
    text: str
    seconds: float
    speculation: Any = field(repr=False)


class Session:
    """A target with a drafter.

    Args:
        settings: What the options say.

    Raises:
        InputError: if a model cannot be loaded, or an option does not fit.
        ValueError: if the drafter does not fit the target.
    """

    def __init__(self, settings: Settings):
        if settings.drafter is not None and settings.draft_model is not None:
            raise InputError("Give either --drafter or --draft-model, not both.")
        if settings.seed is not None and not -(2**63) <= settings.seed < 2**64:
            raise InputError(f"--seed must be a number of 64 bits, got {settings.seed}.")
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        logging.disable_progress_bar()
        self.settings = settings
        model, self.tokenizer = load_target(settings.model)
        self.model = _placed(model, settings)
        drafter: Any = settings.drafter
        if settings.draft_model is not None:
            drafter = _placed(load_model(settings.draft_model), settings)
        enable(self.model, drafter=drafter, tokenizer=self.tokenizer, pack_for_cpu=settings.pack_for_cpu, **self._drafts())
        self.forget()

    def forget(self) -> None:
        """Drops what is kept of earlier turns."""
        self.cache: Any = None
        self.cached: list[int] = []

    def reply(self, messages: Messages, streamer: Any = None) -> Reply:
        """Continues a chat. What the cache of the turn before shares with it is not computed again.

        Args:
            messages: The chat up to the reply.
            streamer: Of `generate`; its `put_round`, if it has one, is shown what was drafted.
        """
        inputs = {name: ids.to(self.model.device) for name, ids in self._inputs(messages).items()}
        prompt = inputs["input_ids"][0].tolist()
        self._keep_common(prompt)
        if self.settings.seed is not None:
            torch.manual_seed(self.settings.seed)
        cache, self.cache = self.cache, None  # an interruption may leave it anyhow
        start = time.perf_counter()
        output = self.model.generate(
            **inputs, **self._arguments(), **{compat.CACHE: cache}, streamer=streamer, speculative=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        tokens = continuations(self.model, inputs, output.sequences)[0]
        self.cache, self.cached = cache, [*prompt, *tokens]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Reply(tokens, text, seconds, output.speculation)

    def record(self, reply: Reply) -> dict[str, Any]:
        """A reply as it is printed for scripts."""
        stats = reply.speculation
        names = (
            "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_emitted_tokens", "mean_acceptance_length",
            "draft_acceptance_rate", "acceptance_at_position", "conditional_acceptance_at_position", "acceptance_histogram",
            "seconds",
        )  # fmt: skip
        return {
            "text": reply.text,
            "tokens": len(reply.tokens),
            "seconds": reply.seconds,
            "tokens_per_second": len(reply.tokens) / reply.seconds,
            "speculation": {name: getattr(stats, name) for name in names},
            "settings": asdict(self.settings),
        }

    def _drafts(self) -> dict[str, Any]:
        chosen = {"draft_tokens": self.settings.draft_tokens, "tree_nodes": self.settings.tree_nodes}
        return {name: value for name, value in chosen.items() if value is not None}

    def _arguments(self) -> dict[str, Any]:
        arguments = {"max_new_tokens": self.settings.max_new_tokens, **sampling_arguments(self.settings.temperature)}
        if self.settings.temperature > 0:
            arguments |= {"top_p": self.settings.top_p, "top_k": self.settings.top_k}
        return arguments

    def _inputs(self, messages: Messages) -> Any:
        return encode(self.tokenizer, [Prompt("", "", tuple(messages))])

    def _keep_common(self, prompt: list[int]) -> None:
        """Cuts the cache to what the prompt begins with, or begins a new one where it cannot be cut."""
        if self.model.config.is_encoder_decoder:
            return
        if self.cache is None:
            self.cache = DynamicCache(config=self.model.config)
            return
        held = self.cache.get_seq_length()
        pairs = zip(self.cached[:held], prompt[:-1], strict=False)
        common = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), min(held, len(prompt) - 1))
        if common == held:
            return
        if all(type(layer) is DynamicLayer for layer in self.cache.layers):
            self.cache.crop(common - held)
        else:  # a window or a state cannot be taken back
            self.cache = DynamicCache(config=self.model.config)


def _placed(model: Any, settings: Settings) -> Any:
    if settings.dtype is not None and settings.dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {settings.dtype!r}.")
    dtype = None if settings.dtype is None else getattr(torch, settings.dtype)
    try:
        return model.to(device=settings.device or model.device, dtype=dtype or model.dtype)
    except (RuntimeError, AssertionError) as error:  # torch's words for a device that is not there
        raise InputError(f"The model cannot be put on --device {settings.device!r}: {error}") from error
