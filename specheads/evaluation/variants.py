"""The ways of generating that are compared, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..drafters import Drafter, load_drafter
from .prompts import InputError

PLAIN = "plain"
DRAFTERS = ("auto", "suffix", "recycling", "lookup", "lookahead", "wrong", "none")
STOCK_LOOKUP = "hf-lookup"
PACKED = "+packed"
AGAIN = "#"
HEADS = ("head", "head-alone")
WITH_MODEL = ("assisted", "hf-assisted", *HEADS)


@dataclass(frozen=True)
class Variant:
    """One way of generating.

    Args:
        name: As the user wrote it.
        kind: `"plain"`, a drafter's name, `"hf-lookup"`, `"assisted"`, `"hf-assisted"`, `"head"` (as `enable` takes it, with
            copies of earlier text) or `"head-alone"`.
        draft_model: For the last four, the folder or id of the draft model or head.
        draft_tokens: For `"hf-lookup"`, how many tokens it drafts.
        is_packed: Whether it runs on a copy of the target with prepacked weights.
    """

    name: str
    kind: str
    draft_model: str | None = None
    draft_tokens: int | None = None
    is_packed: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it runs through `speculative=`."""
        return self.kind in (*DRAFTERS, "assisted", *HEADS)

    @property
    def is_stock_assisted(self) -> bool:
        """Whether it is an assisted mode of transformers, which takes one prompt at a time."""
        return self.kind in (STOCK_LOOKUP, "hf-assisted")


def parse_variants(text: str) -> list[Variant]:
    """Reads names separated by commas. `plain`, which all are compared with, comes first, named or not.

    What is named again is measured again, as `auto#2`: how far two measurements of one thing differ is how far to trust any.

    Raises:
        InputError: if a name is unknown, or lacks its model.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if PLAIN not in names:
        names.insert(0, PLAIN)
    names.sort(key=lambda name: name != PLAIN)
    times = [names[:place].count(name) + 1 for place, name in enumerate(names)]
    variants = [_parse_variant(name) for name in names]
    return [
        variant if time == 1 else replace(variant, name=f"{variant.name}{AGAIN}{time}")
        for variant, time in zip(variants, times, strict=True)
    ]


def parse_speculative(text: str) -> list[Variant]:
    """Reads names separated by commas of variants that draft by this library.

    Raises:
        InputError: as `parse_variants`, or if one of them does not, or stands twice.
    """
    variants = [variant for variant in parse_variants(text) if variant.kind != PLAIN]
    repeated = next((one for one in variants if any(one.name.startswith(f"{other.name}{AGAIN}") for other in variants)), None)
    if repeated is not None:
        raise InputError(f"The variant {repeated.name.rpartition(AGAIN)[0]} is named twice.")
    foreign = next((variant.name for variant in variants if not variant.is_ours or variant.is_packed), None)
    if foreign is not None or not variants:
        known = ", ".join((*DRAFTERS, *(f"{kind}:<model>" for kind in WITH_MODEL if kind != "hf-assisted")))
        raise InputError(f"--variant {text}: only drafters of this library can be measured here: {known}.")
    return variants


def _parse_variant(name: str) -> Variant:
    is_packed = name.endswith(PACKED)
    kind, _, more = name.removesuffix(PACKED).partition(":")
    if kind in WITH_MODEL:
        if not more:
            what = "head" if kind in HEADS else "draft model"
            raise InputError(f"The variant {name} needs a {what}: write {kind}:<folder or id>.")
        return Variant(name, kind, more, is_packed=is_packed)
    if kind == STOCK_LOOKUP and (not more or more.isdecimal()):
        return Variant(name, kind, draft_tokens=int(more) if more else None, is_packed=is_packed)
    if kind in (PLAIN, *DRAFTERS) and not more:
        return Variant(name, kind, is_packed=is_packed)
    stock = (STOCK_LOOKUP, f"{STOCK_LOOKUP}:<tokens>")
    known = ", ".join((PLAIN, *DRAFTERS, *stock, *(f"{kind}:<model>" for kind in WITH_MODEL)))
    raise InputError(f"There is no variant {name}; there are {known}, each of them also with {PACKED} at its end.")


def generate_arguments(
    variant: Variant,
    options: Mapping[str, Any],
    draft_tokens: int | None,
    load_draft: Callable[[str], Any],
) -> dict[str, Any]:
    """The arguments of `generate` that make a variant.

    Args:
        variant: The variant.
        options: Fields of `SpeculativeConfig` for those that are ours.
        draft_tokens: How many tokens transformers' own modes draft; `None` leaves it to them.
        load_draft: Loads a draft model by folder or id.
    """
    if variant.kind == PLAIN:
        return {}
    if variant.kind == STOCK_LOOKUP:
        return {"prompt_lookup_num_tokens": variant.draft_tokens or draft_tokens or STOCK_LOOKUP_TOKENS}
    if variant.kind in HEADS:
        return {"speculative": dict(options)}  # it is attached to the target
    if variant.draft_model is None:
        return {"speculative": {"drafter": variant.kind, **options}}
    draft = load_draft(variant.draft_model)
    if variant.kind == "assisted":
        return {"speculative": dict(options), "assistant_model": draft}
    if draft_tokens is not None:
        draft.generation_config.num_assistant_tokens = draft_tokens
    return {"assistant_model": draft}


def load_heads(variants: Sequence[Variant], target: Any, tokenizer: Any) -> dict[str, Drafter]:
    """For the variants that are heads, what is to be attached to the target. Adapters that go with a head are left out.

    Raises:
        InputError: if one cannot be loaded or does not fit.
    """
    heads = {}
    for variant in variants:
        if variant.kind in HEADS:
            try:
                heads[variant.name] = load_drafter(
                    variant.draft_model, target, tokenizer, with_suffix=variant.kind != "head-alone"
                )
            except (OSError, ValueError, TypeError) as error:
                raise InputError(f"The head {variant.draft_model} cannot be used: {error}") from error
    return heads


# What the documentation of transformers uses in its examples.
STOCK_LOOKUP_TOKENS = 10


def options_of(draft_tokens: int | None, tree_nodes: int | None) -> dict[str, Any]:
    """The fields of `SpeculativeConfig` that were chosen; the others keep their defaults."""
    chosen = {"draft_tokens": draft_tokens, "tree_nodes": tree_nodes}
    return {name: value for name, value in chosen.items() if value is not None}


def check_batch_size(variants: Sequence[Variant], batch_size: int) -> None:
    """Raises `InputError` if a variant cannot run in batches of this size."""
    stock = [variant.name for variant in variants if variant.is_stock_assisted]
    if stock and batch_size > 1:
        raise InputError(f"{', '.join(stock)}: transformers drafts for one prompt at a time; use a batch size of 1.")
