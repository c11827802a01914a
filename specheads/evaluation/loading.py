"""What the names of variants stand for: drafters to attach to the target, and arguments of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..drafters import Drafter, load_drafter
from .prompts import InputError
from .variants import BETWEEN_MODELS, BY_NAME, HEAD, HEAD_ALONE, NODES, PLAIN, STOCK_ASSISTED, STOCK_LOOKUP, Variant

# What the documentation of transformers uses in its examples.
STOCK_LOOKUP_TOKENS = 10

LoadDraft = Callable[[str], tuple[Any, Any]]  # of a draft model's folder or id: the model, and its tokenizer if it has one


def load_drafters(variants: Sequence[Variant], target: Any, tokenizer: Any, load_draft: LoadDraft) -> dict[str, Drafter]:
    """For the variants that need more than a name, what is to be attached to the target.

    Adapters that go with a head are left out.

    Args:
        variants: The variants.
        target: The target.
        tokenizer: Its tokenizer.
        load_draft: Loads a draft model and its tokenizer by folder or id.

    Raises:
        InputError: if one cannot be loaded or does not fit.
    """
    return {
        variant.name: _load(variant, target, tokenizer, load_draft)
        for variant in variants
        if variant.is_ours and variant.kind not in BY_NAME
    }


def _load(variant: Variant, target: Any, tokenizer: Any, load_draft: LoadDraft) -> Drafter:
    kind, argument = variant.kind, variant.argument or ""
    if kind in (HEAD, HEAD_ALONE):
        return _made(f"The head {argument}", "cannot be used", argument, target, tokenizer, with_suffix=kind != HEAD_ALONE)
    if kind in ("early-exit", "mtp", "retrieval"):
        name = kind if variant.argument is None else f"{kind}:{argument}"
        return _made(f"The drafter {name}", "cannot be used", name, target, tokenizer)
    # A folder may have a `+` in its name, unless it stands among several.
    models = [load_draft(name) for name in (argument.split(BETWEEN_MODELS) if kind == "tree" else [argument])]
    what = f"The draft model{'' if len(models) == 1 else 's'} {argument}"
    verb = "does not fit" if len(models) == 1 else "do not fit"
    spec: Any = models[0][0]
    if kind == "tree":
        spec = [model for model, _ in models]
    elif kind == "staged":
        spec = {"draft": spec, "inner": "suffix"}
    return _made(what, verb, spec, target, tokenizer, models[0][1])


def _made(what: str, verb: str, spec: Any, target: Any, *tokenizers: Any, **options: Any) -> Drafter:
    try:
        return load_drafter(spec, target, *tokenizers, **options)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{what} {verb}: {error}") from error


def generate_arguments(
    variant: Variant,
    options: Mapping[str, Any],
    draft_tokens: int | None,
    tokenizer: Any,
    load_draft: LoadDraft,
) -> dict[str, Any]:
    """The arguments of `generate` that make a variant, beside the drafter that `load_drafters` made for it.

    Args:
        variant: The variant.
        options: Fields of `SpeculativeConfig` for those that are ours. The variant's own number of nodes goes before.
        draft_tokens: How many tokens transformers' own modes draft; `None` leaves it to them.
        tokenizer: The target's tokenizer.
        load_draft: As for `load_drafters`.

    Raises:
        InputError: if a draft model cannot be loaded, or a tree of draft models has no number of nodes.
    """
    if variant.kind == PLAIN or variant.is_peer:
        return {}
    if variant.kind == STOCK_LOOKUP:
        return {"prompt_lookup_num_tokens": int(variant.argument or 0) or draft_tokens or STOCK_LOOKUP_TOKENS}
    if variant.kind == STOCK_ASSISTED:
        return _stock_assisted(variant.argument or "", draft_tokens, tokenizer, load_draft)
    fields = dict(options) if variant.tree_nodes is None else {**options, "tree_nodes": variant.tree_nodes}
    if variant.kind == "tree" and fields.get("tree_nodes") is None:
        raise InputError(
            f"The variant {variant.name} needs a number of nodes for its trees: write {variant.name}{NODES}<nodes>, or give "
            "--tree-nodes."
        )
    return {"speculative": {"drafter": variant.kind, **fields} if variant.kind in BY_NAME else fields}


def _stock_assisted(name: str, draft_tokens: int | None, tokenizer: Any, load_draft: LoadDraft) -> dict[str, Any]:
    draft, own = load_draft(name)
    if draft_tokens is not None:
        draft.generation_config.num_assistant_tokens = draft_tokens
    arguments = {"assistant_model": draft}
    # Given both, transformers translates between them, equal or not.
    if None in (own, tokenizer) or own.get_vocab() == tokenizer.get_vocab():
        return arguments
    return {**arguments, "tokenizer": tokenizer, "assistant_tokenizer": own}


def options_of(draft_tokens: int | None, tree_nodes: int | None) -> dict[str, Any]:
    """The fields of `SpeculativeConfig` that were chosen; the others keep their defaults."""
    chosen = {"draft_tokens": draft_tokens, "tree_nodes": tree_nodes}
    return {name: value for name, value in chosen.items() if value is not None}
