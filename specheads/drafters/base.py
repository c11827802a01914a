"""What a drafter is, what it is told, and how it is found by name.

Shapes: B lines (the rows still going, in the order of the target's pass), N draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import SpeculativeConfig
from ..families import family_of
from ..features import PromptFeatures
from ..processors import ScoreProcessors
from ..randomness import Noise
from ..sequences import Sequences
from ..target import ModelRunner
from ..tree import NO_TOKEN, DraftTree


@dataclass
class DraftContext:
    """What a call tells its drafter.

    Args:
        rows: The batch row of each line. Changes in place as rows finish.
        sequences: The ids of the batch.
        prompts: Per batch row, the prompt's tokens without padding (for an encoder-decoder, the decoder's). What is no token of
            the target's, an image for instance, is one that it cannot say.
        encoder_ids: `[B, S]` the encoder's input ids, or `None`.
        encoder_mask: `[B, S]` its attention mask, or `None`.
        processors: The call's logits processors.
        noise: What sampling draws from; `None` if the call is greedy.
        config: The call's settings.
        vocab_size: V, as the target's logits have it.
        device: Where the target's logits are.
        takes_trees: Whether the target can verify trees; else drafts must be chains.
        positions_left: Per batch row, how many tokens after the prompt the target has positions for; `None` if they do not end.
        weighs_proposals: Whether the verification uses the laws of sampled nodes. If not, they need not be kept.
        positions: How many the target has for certain, the prompt's included; `None` if they do not end, or may not.
        encoder_inputs: `[B, S, ...]` what the encoder read, ids or sound; `None` where only its outputs are known.
        prompt_features: The target's hidden states of the prompt, for drafters with `feature_layers`; there for `begin` only,
            so that they do not stay.
        target: The target with its cache, for drafters that run a part of it between its passes; `None` before it is there.
    """

    rows: list[int]
    sequences: Sequences
    prompts: list[list[int]]
    encoder_ids: Tensor | None
    encoder_mask: Tensor | None
    processors: ScoreProcessors
    noise: Noise | None
    config: SpeculativeConfig
    vocab_size: int
    device: torch.device
    takes_trees: bool
    positions_left: list[int] | None
    weighs_proposals: bool
    positions: int | None = None
    encoder_inputs: Tensor | None = None
    prompt_features: PromptFeatures | None = None
    target: ModelRunner | None = None

    def length(self, line: int) -> int:
        """How many tokens the line's row has, prompt included."""
        row = self.rows[line]
        return len(self.prompts[row]) + len(self.sequences.continuations[row])

    def room(self, line: int) -> int:
        """How many tokens may be drafted along a path for the line: the target adds one more, and needs a position for each."""
        row = self.rows[line]
        if self.sequences.is_padded(row):
            return 0
        room = self.sequences.remaining(row) - 1
        return room if self.positions_left is None else min(room, self.positions_left[row] - self.sequences.generated(row))

    def check_positions(self) -> None:
        """Refuses to go on with a row that has used up the target's positions, on which plain decoding breaks off too.

        Raises:
            ValueError: naming the row.
        """
        if self.positions is None or self.positions_left is None:
            return
        for row in self.rows:
            generated = self.sequences.generated(row)
            if generated > self.positions_left[row]:
                raise ValueError(
                    f"Row {row} of the batch has reached the last of the model's {self.positions} positions before it ended, "
                    f"after {generated} new tokens; ask for no more of them (`max_new_tokens`), or shorten the prompt."
                )

    def tokens(self, line: int, start: int = 0) -> list[int]:
        """The line's tokens from `start` on, prompt included, without padding."""
        row = self.rows[line]
        prompt, continuation = self.prompts[row], self.sequences.continuations[row]
        if start < len(prompt):
            return prompt[start:] + continuation
        return continuation[start - len(prompt) :]


@dataclass
class Budget:
    """How much to draft in a round.

    Args:
        depths: Per line, the most tokens along a path.
        nodes: The most nodes in a line's tree.
        entry_cost: What a pass with drafts must bring beyond one without, in tokens of a row; in a batch, of all rows by their
            shares (`pacing.shares`).
        node_cost: How much more it must bring for each node that the widest row has.
        pass_worth: What the time of a plain pass must bring, likewise; at least what plain decoding gets from it.
        balance: How many plain passes more than one a round may cost, whatever it promises.
        pass_cost: What a pass with so many tokens of each row beside its last one costs, in plain passes.
    """

    depths: list[int]
    nodes: int
    entry_cost: float = 0.0
    node_cost: float = 0.0
    pass_worth: float = 1.0
    balance: float = float("inf")
    pass_cost: Callable[[int], float] = lambda tokens: 1.0

    @property
    def depth(self) -> int:
        """The largest of the lines' depths."""
        return max(self.depths)


@dataclass
class Accepted:
    """What a round kept.

    Args:
        tree: The draft.
        paths: Per line, the accepted nodes that were kept.
        tokens: Per line, the tokens that were kept: those of its path and then the target's own.
        logits: `[B, N + 1, V]` of the target at the root and the nodes, raw.
        features: `[B, N + 1, L H]` the target's hidden states at the root and the nodes, those of the drafter's
            `feature_layers` side by side; `None` for drafters without. After the prompt, the root is its last token.
        probed: `[B, E, V]` logits of the target after the draft's probes, raw; `None` if it had none.
        maxima: `[B, N + 1, D]` the `block_maxima` of `logits`, if the verification has looked for them.
    """

    tree: DraftTree
    paths: list[list[int]]
    tokens: list[list[int]]
    logits: Tensor
    features: Tensor | None = None
    probed: Tensor | None = None
    maxima: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens. Whatever it proposes, the output keeps the target's law.

    Each call of `generate` works on a shallow copy, and `begin` makes everything that changes, so that calls do not meet: not
    in threads, not nested, and not after one that failed.

    Attributes:
        step_cost: What drafting one more level costs, in passes of the target over one token.
        weighs_nodes: Whether it knows how likely its nodes are, leaves out those that do not pay by the budget's costs, and
            says what it expects in `DraftTree.expected`. May depend on the call, and is settled by `begin`.

    A drafter that follows rows of one length only says so by an attribute `needs_step = True`; one that reads hidden states of
    the target names their indices in `hidden_states` by an attribute `feature_layers`. One for targets whose passes take trees
    says `needs_trees = True`, and one that cannot do without `tree_nodes` says `needs_tree_nodes = True`: what does not fit is
    refused before anything is computed. One that is best used with certain settings has them as a dict `settings`, which
    `enable` takes where it is not told otherwise.
    """

    step_cost: float
    weighs_nodes: bool

    def begin(self, context: DraftContext) -> None:
        """The prompt is in. Makes all that changes during the call."""

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A draft for every line, within the budget; a chain unless `context.takes_trees`."""

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """The round is settled; `context.sequences` already holds its tokens."""

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Rows have finished: `lines[i]` becomes line i. `context.rows` already says so."""


def check_target(drafter: Drafter, target: PreTrainedModel) -> None:
    """Refuses a target that the drafter cannot draft for.

    Raises:
        ValueError: if the drafter needs a target that takes trees, and this one takes chains only.
    """
    if getattr(drafter, "needs_trees", False) and not family_of(target).takes_trees:
        raise ValueError(
            f"The drafter {type(drafter).__name__} needs a target whose passes take a tree, and {type(target).__name__} takes "
            'chains only; use "auto" or another drafter.'
        )


def check_settings(drafter: Drafter, config: SpeculativeConfig) -> None:
    """Refuses settings that the drafter cannot draft with.

    Raises:
        ValueError: if the drafter needs a number of nodes and there is none.
    """
    if getattr(drafter, "needs_tree_nodes", False) and config.tree_nodes is None:
        raise ValueError(
            "A tree of several draws needs a number of nodes that it may have, and `tree_nodes` is None; set it in "
            "`speculative={'tree_nodes': ...}` or in `enable`."
        )


def is_own(drafter: Drafter) -> bool:
    """Whether a drafter is one of this library's, whose trees need no check."""
    return type(drafter).__module__.startswith(f"{__package__}.")


def check_draft(tree: DraftTree, context: DraftContext) -> None:
    """Checks what another's drafter proposes.

    Raises:
        TypeError: if it is no `DraftTree`.
        ValueError: if it is not a valid one.
    """
    if not isinstance(tree, DraftTree):
        raise TypeError(f"A drafter's `propose` must return a DraftTree, got {type(tree).__name__}.")
    tree.check(len(context.rows), context.vocab_size, context.takes_trees)


def with_padded_rows(tree: DraftTree, context: DraftContext) -> DraftTree:
    """A draft of padding in place of its own for rows that have ended and wait for others: it will be accepted."""
    ended = [line for line, row in enumerate(context.rows) if context.sequences.is_padded(row)]
    if not ended or not tree.size:
        return tree
    order = torch.arange(tree.size, device=tree.tokens.device)
    tokens = tree.tokens.clone()
    tokens[ended] = torch.where(order < tree.depth, context.sequences.pad_token, NO_TOKEN)
    parents = tree.parents.clone()
    parents[ended] = order if tree.is_chain else torch.where(order < tree.depth, order, 0)
    proposal_of = None if tree.proposal_of is None else tree.proposal_of.clone()
    if proposal_of is not None:
        proposal_of[ended] = -1
    repeats = None if tree.repeats is None else tree.repeats.clone()
    if repeats is not None:
        repeats[ended] = -1
    return replace(tree, tokens=tokens, parents=parents, proposal_of=proposal_of, repeats=repeats)


# A name, and the module and class that bear it. Imported on use, so that a drafter costs nothing to those who do without.
REGISTRY: dict[str, tuple[str, str]] = {
    "none": ("none", "NoDrafter"),
    "lookup": ("lookup", "LookupDrafter"),
    "suffix": ("suffix", "SuffixDrafter"),
    "recycling": ("recycling", "RecyclingDrafter"),
    "auto": ("auto", "AutoDrafter"),
    "lookahead": ("lookahead", "LookaheadDrafter"),
    "wrong": ("wrong", "WrongDrafter"),
}
# Those that are made of a target's own weights; what follows a colon after the name is handed on.
OF_TARGET: dict[str, tuple[str, str]] = {
    "early-exit": ("early_exit", "early_exit_drafter"),
    "mtp": ("mtp", "mtp_drafter"),
}


def drafter_by_name(name: str) -> Drafter:
    """Builds a training-free drafter.

    Raises:
        ValueError: if there is no drafter of that name.
    """
    if name not in REGISTRY:
        raise ValueError(
            f"Unknown drafter {name!r}; known are {', '.join([*REGISTRY, *OF_TARGET])}, `retrieval:` with the folder of a "
            "datastore, and a draft head's folder or id, `owner/name`."
        )
    module, class_name = REGISTRY[name]
    build: Callable[[], Drafter] = getattr(import_module(f".{module}", __package__), class_name)
    return build()


def drafter_of_target(name: str, target: PreTrainedModel, **options: Any) -> Drafter:
    """Builds a drafter of a target's own weights, by its name and perhaps a colon and an argument."""
    name, _, argument = name.partition(":")
    module, builder = OF_TARGET[name]
    build: Callable[..., Drafter] = getattr(import_module(f".{module}", __package__), builder)
    return build(target, argument, **options)
