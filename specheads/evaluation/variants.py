"""The ways of generating that are compared, by name. `loading` makes the drafters that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .prompts import InputError

PLAIN = "plain"
BY_NAME = ("auto", "suffix", "recycling", "lookup", "lookahead", "wrong", "none")
OF_TARGET = ("early-exit", "mtp")
AGAIN = "#"
HEAD, HEAD_ALONE = "head", "head-alone"  # with copies, and without
STOCK_LOOKUP = "hf-lookup"
STOCK_ASSISTED = "hf-assisted"
ECONOMIZE_LOOKUP = "economize-lookup"
PACKED = "+packed"
NODES = "@"
BETWEEN_MODELS = "+"

# What stands after the colon: what is needed, and how it is written.
NEEDED = {
    "retrieval": ("datastore", "<folder>"),
    "assisted": ("draft model", "<folder or id>"),
    "staged": ("draft model", "<folder or id>"),
    "tree": ("draft model, or several", f"<folder or id>{BETWEEN_MODELS}<folder or id>"),
    HEAD: ("head", "<folder or id>"),
    HEAD_ALONE: ("head", "<folder or id>"),
    STOCK_ASSISTED: ("draft model", "<folder or id>"),
}
COUNTED = {"early-exit": "<layers>", STOCK_LOOKUP: "<tokens>", ECONOMIZE_LOOKUP: "<tokens>"}  # what may stand there, a number
STOCK = (STOCK_LOOKUP, STOCK_ASSISTED)
PEERS = (ECONOMIZE_LOOKUP,)
OURS = (*BY_NAME, *OF_TARGET, *(kind for kind in NEEDED if kind != STOCK_ASSISTED))


def _spellings(kinds: Sequence[str]) -> str:
    found = []
    for kind in kinds:
        if kind not in NEEDED:
            found.append(kind)
        if kind in NEEDED or kind in COUNTED:
            found.append(f"{kind}:{NEEDED[kind][1] if kind in NEEDED else COUNTED[kind]}")
    return ", ".join(found)


OURS_LISTED = _spellings(OURS)
ALL_LISTED = _spellings((PLAIN, *OURS, *STOCK, *PEERS))
OURS_HELP = (
    f"names separated by commas: {OURS_LISTED}; head:... is a head as it is attached, with copies of earlier text, and "
    f"head-alone:... without; with {NODES}<nodes> at its end, in trees of up to so many nodes"
)


@dataclass(frozen=True)
class Variant:
    """One way of generating.

    Args:
        name: As the user wrote it.
        kind: What stands before the colon; the whole name where there is none.
        argument: What stands after it.
        tree_nodes: The most nodes of its draft trees, where the name says so.
        is_packed: Whether it runs on a copy of the target with prepacked weights.
    """

    name: str
    kind: str
    argument: str | None = None
    tree_nodes: int | None = None
    is_packed: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it runs through `speculative=`."""
        return self.kind in OURS

    @property
    def is_stock_assisted(self) -> bool:
        """Whether it is an assisted mode of transformers, which takes one prompt at a time."""
        return self.kind in STOCK

    @property
    def is_peer(self) -> bool:
        """Whether another library runs the target for it, one prompt at a time."""
        return self.kind in PEERS


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
        raise InputError(f"--variant {text}: only drafters of this library can be measured here: {OURS_LISTED}.")
    return variants


def _parse_variant(name: str) -> Variant:
    is_packed = name.endswith(PACKED)
    whole, tree_nodes = _without_nodes(name.removesuffix(PACKED))
    kind, _, argument = whole.partition(":")
    if kind in NEEDED:
        what, written = NEEDED[kind]
        if not all(argument.split(BETWEEN_MODELS) if kind == "tree" else [argument]):
            raise InputError(f"The variant {name} needs a {what}: write {kind}:{written}.")
    is_known = kind in NEEDED or (kind in (PLAIN, *OURS, *STOCK, *PEERS) and not argument)
    if not is_known and not (kind in COUNTED and argument.isdecimal()):
        raise InputError(f"There is no variant {name}; there are {ALL_LISTED}, each of them also with {PACKED} at its end.")
    variant = Variant(name, kind, argument or None, tree_nodes, is_packed)
    if tree_nodes is not None and not variant.is_ours:
        raise InputError(f"The variant {name} drafts no trees of a chosen size; drop {NODES}{tree_nodes}.")
    return variant


def _without_nodes(name: str) -> tuple[str, int | None]:
    """A name without the number of nodes at its end, and that number."""
    whole, mark, nodes = name.rpartition(NODES)
    if not mark or not nodes.isdecimal():
        return name, None
    if int(nodes) < 1:
        raise InputError(f"The variant {name} needs at least 1 node for its trees, got {nodes}.")
    return whole, int(nodes)


def check_batch_size(variants: Sequence[Variant], batch_size: int) -> None:
    """Raises `InputError` if a variant cannot run in batches of this size."""
    single = [variant.name for variant in variants if variant.is_stock_assisted or variant.is_peer]
    if single and batch_size > 1:
        raise InputError(f"{', '.join(single)}: drafts are for one prompt at a time there; use a batch size of 1.")
