"""The target writes replies on this machine, speculatively.

Shapes: B conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..evaluation.prompts import InputError
from ..evaluation.runs import continuations, end_ids
from .answers import EMPTY, REFUSED, TOO_LONG, Ask, Reply
from .chat_format import ChatFormat

REPLACEMENT = "\ufffd"  # what half a character decodes to


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn.

    Args:
        temperature: 0 is greedy.
        top_p: The share of the probability that is drawn from.
        top_k: How many tokens are drawn from; 0 for all.
        max_new_tokens: The most tokens of a reply.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024

    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate`."""
        if self.temperature == 0:
            return {"do_sample": False, "max_new_tokens": self.max_new_tokens}
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"do_sample": True, "max_new_tokens": self.max_new_tokens, **drawn}


class TargetWriter:
    """Replies of a target at hand.

    Noise is keyed by each reply's seed, so that a reply does not depend on its neighbours or the drafter, but for rounding:
    where two tokens are as good as tied, passes of another shape may round to the other.

    Args:
        model: The target, enabled.
        tokenizer: Its tokenizer.
        template_arguments: Further arguments of its chat template.
        sampling: How replies are drawn.
        max_prompt_tokens: The longest prompt that is answered; by default what the model's positions leave room for.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        template_arguments: dict[str, Any],
        sampling: Sampling,
        max_prompt_tokens: int | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.format = ChatFormat(tokenizer, template_arguments)
        self.sampling = sampling
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        places = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        room = None if places is None else places - sampling.max_new_tokens
        self.max_prompt_tokens = min((most for most in (room, max_prompt_tokens) if most is not None), default=None)

    def reply(self, asks: Sequence[Ask]) -> list[Reply]:
        """A reply to each conversation, in one batch."""
        replies: list[Reply | None] = [None] * len(asks)
        texts: dict[int, str] = {}
        for place, ask in enumerate(asks):
            try:
                text = self.format.render(ask.messages, ask.tools, "this conversation", add_generation_prompt=True)
            except InputError as error:
                replies[place] = Reply(failure=REFUSED, detail=str(error))
                continue
            length = len(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
                replies[place] = Reply(failure=TOO_LONG, detail=f"{length} tokens, and {self.max_prompt_tokens} are the most")
            else:
                texts[place] = text
        if texts:
            rows = self._generate(list(texts.values()), [asks[place].seed for place in texts])
            for (place, text), ids in zip(texts.items(), rows, strict=True):
                replies[place] = self._read(asks[place], text, ids)
        return [reply for reply in replies if reply is not None]

    @torch.inference_mode()
    def _generate(self, texts: list[str], seeds: list[int]) -> list[list[int]]:
        # The template has written the special tokens already.
        encoded = self.tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        inputs = {name: encoded[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        speculative = {"seed": seeds, "sampling_noise": "keyed"}
        sequences = self.model.generate(**inputs, **self.sampling.arguments(), speculative=speculative)
        return continuations(self.model, inputs, sequences)

    def _read(self, ask: Ask, asked: str, ids: list[int]) -> Reply:
        is_cut = ids[-1] not in end_ids(self.model)
        text = self.tokenizer.decode(ids if is_cut else ids[:-1], clean_up_tokenization_spaces=False)
        if is_cut:
            text = text.rstrip(REPLACEMENT)
        if not text.strip():
            return Reply(failure=EMPTY, num_tokens=len(ids))
        # Templates put white space of their own around a reply, or take it away.
        for content in (text, text.strip()):
            message = {"role": "assistant", "content": content}
            if self._renders(ask, message, asked + text, is_cut):
                return Reply(message, len(ids), is_cut)
        return Reply({"role": "assistant", "content": text}, len(ids), is_cut, written=text)

    def _renders(self, ask: Ask, message: dict[str, Any], expected: str, is_cut: bool) -> bool:
        """Whether the template renders a reply as it was written."""
        try:
            text = self.format.render([*ask.messages, message], ask.tools, "this conversation")
        except InputError:
            return False
        end = self.format.end if self.format.writes_end else ""
        return text.startswith(expected + end)
