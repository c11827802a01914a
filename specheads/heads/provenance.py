"""Which target a head was made for, and whether another one is it.

Fingerprints are made of few values of every weight, rounded to bfloat16, so that they cost little and do not depend on the
precision a model is loaded in.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .revision import cached_revision
from .target_parts import TargetParts, parts_of

SAMPLES = 16  # values per weight


def weights_fingerprint(model: PreTrainedModel) -> str | None:
    """A fingerprint of a model's weights; `None` if some are not in memory."""
    digest = hashlib.sha256()
    for _, weight in sorted(model.named_parameters(), key=lambda item: item[0]):
        if weight.device.type == "meta":
            return None
        flat = _readable(weight.detach()).flatten()
        places = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64).long()
        values = flat[places.to(flat.device)].to(torch.bfloat16).float().cpu()
        digest.update(repr((tuple(weight.shape), values.tolist())).encode())
    return digest.hexdigest()[:32]


def _readable(weight: Tensor) -> Tensor:
    """A weight whose values can be picked: a quantised one of a class of its own is brought back to numbers as a whole."""
    return weight if type(weight).dequantize is Tensor.dequantize else weight.dequantize()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A fingerprint of a tokenizer's vocabulary."""
    return _text_fingerprint(json.dumps(sorted(tokenizer.get_vocab().items())))


def template_fingerprint(tokenizer: Any) -> str | None:
    """A fingerprint of a tokenizer's chat template; `None` if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return _text_fingerprint(json.dumps(template, sort_keys=True)) if template else None


def describe_target(target: PreTrainedModel, tokenizer: Any = None, revision: str | None = None) -> dict[str, Any]:
    """What a head's config keeps about its target: name, revision, shapes and fingerprints.

    Args:
        target: The model.
        tokenizer: Its tokenizer, if at hand.
        revision: The revision it was loaded at; found in the cache of downloads if it is not given and is there.
    """
    parts = parts_of(target)
    return {
        "name_or_path": target.config._name_or_path or None,
        "architectures": target.config.architectures or [type(target).__name__],
        "model_type": parts.config.model_type,
        "revision": revision or cached_revision(target),
        "weights_fingerprint": weights_fingerprint(target),
        "tokenizer_fingerprint": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "chat_template_fingerprint": None if tokenizer is None else template_fingerprint(tokenizer),
        "hidden_size": parts.hidden_size,
        "vocab_size": parts.vocab_size,
        "layers": parts.layers,
    }


def check_target(
    made_for: dict[str, Any], target: PreTrainedModel, tokenizer: Any = None, revision: str | None = None
) -> TargetParts:
    """Checks a target against what a head's config says of the one it was made for.

    Args:
        made_for: `describe_target` of that one, or a part of it: what it does not say is not checked.
        target: The target at hand.
        tokenizer: Its tokenizer, if at hand.
        revision: The revision it was loaded at, if known.

    Returns:
        The parts of the target.

    Raises:
        ValueError: if a shape, the number of layers or the vocabulary differs.

    Warns:
        UserWarning: if the weights, the revision or the chat template differ: what is generated stays exact, fewer drafts
            will hold.
    """
    parts = parts_of(target)
    here = {"hidden_size": parts.hidden_size, "vocab_size": parts.vocab_size, "layers": parts.layers}
    wrong = [f"{name} {made_for[name]}, not {value}" for name, value in here.items() if made_for.get(name) not in (None, value)]
    if wrong:
        raise ValueError(
            f"The head does not fit {_name(target)}: it was made for {made_for.get('name_or_path') or 'a target'} with "
            f"{', '.join(wrong)}. Load it with the target that it was made for."
        )
    if tokenizer is not None:
        _check_tokenizer(made_for, tokenizer)
    _warn_of_other_weights(made_for, target, revision)
    return parts


def _check_tokenizer(made_for: dict[str, Any], tokenizer: Any) -> None:
    vocabulary, template = made_for.get("tokenizer_fingerprint"), made_for.get("chat_template_fingerprint")
    if vocabulary and vocabulary != (own := tokenizer_fingerprint(tokenizer)):
        raise ValueError(
            f"The head was made for a tokenizer with another vocabulary (fingerprint {vocabulary}, not {own}), so its tokens "
            "mean something else; load it with the tokenizer of the target it was made for."
        )
    if template and template != (own_template := template_fingerprint(tokenizer)):
        warnings.warn(
            f"The head was trained with another chat template (fingerprint {template}, this tokenizer has {own_template}): "
            "what is generated stays exact, but fewer drafts will be accepted.",
            stacklevel=4,
        )


def _warn_of_other_weights(made_for: dict[str, Any], target: PreTrainedModel, revision: str | None) -> None:
    expected, stated = made_for.get("weights_fingerprint"), made_for.get("revision")
    own = weights_fingerprint(target) if expected else None
    if own and expected:  # where weights can be compared, they decide: a revision may change without them
        if own == expected:
            return
        revision = revision or cached_revision(target)
    elif not stated or (revision := revision or cached_revision(target)) in (None, stated):
        return
    warnings.warn(
        f"The head was made for {_named(made_for.get('name_or_path'), stated, expected)} and the target is "
        f"{_named(_name(target), revision, own)}: what is generated stays exact, but fewer drafts may be accepted.",
        stacklevel=4,
    )


def _named(name: str | None, revision: str | None, fingerprint: str | None) -> str:
    return f"{name or 'an unnamed model'} (revision {revision or 'unknown'}, weights {fingerprint or 'unknown'})"


def _name(target: PreTrainedModel) -> str:
    return target.config._name_or_path or type(target).__name__


def _text_fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
