"""What was drafted and what held of it, round by round, in the same terms for either engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import specheads
from specheads.heads import DraftHead


@dataclass
class Text:
    """A continuation and its rounds.

    Args:
        tokens: The continuation.
        drafts: The draft of each round.
        accepted: How much of each draft held.
    """

    tokens: list[int]
    drafts: list[list[int]]
    accepted: list[int]

    def rounds(self, draft_tokens: int) -> dict[int, tuple[list[int], int]]:
        """Drafts and what held of them, by the number of tokens before them.

        The rounds in which the text may end are left out: there one engine drafts less, and the other counts tokens that it
        does not say.
        """
        rounds, length = {}, 1  # the pass over the prompt says a token
        for draft, accepted in zip(self.drafts, self.accepted, strict=True):
            if length + draft_tokens < len(self.tokens):
                rounds[length] = (draft, accepted)
            length += accepted + 1
        return rounds


def acceptance(texts: list[Text], draft_tokens: int) -> list[float]:
    """For each position of a draft, in what share of the rounds it was reached and held."""
    counts = [accepted for text in texts for _, accepted in text.rounds(draft_tokens).values()]
    return [sum(count > position for count in counts) / len(counts) for position in range(draft_tokens)]


def drafted_alike(ours: list[Text], theirs: list[Text], draft_tokens: int) -> float:
    """The share of drafted tokens that are the same, of the rounds at the same places of the texts."""
    pairs = [
        (draft, other.rounds(draft_tokens)[place][0])
        for own, other in zip(ours, theirs, strict=True)
        for place, (draft, _) in own.rounds(draft_tokens).items()
        if place in other.rounds(draft_tokens)
    ]
    same = [token == other for draft, others in pairs for token, other in zip(draft, others, strict=True)]
    return sum(same) / len(same)


def generated(model: Any, head: DraftHead | None, prompts: list[list[int]], draft_tokens: int, max_tokens: int) -> list[Text]:
    """Greedy texts as `generate` makes them, with a head or, without rounds, plainly."""
    drafts: list[list[int]] = []
    if head is not None:
        specheads.enable(model, drafter=noting(specheads.load_drafter(head, model, with_suffix=False), drafts))
    speculative = {"draft_tokens": draft_tokens, "adaptive": False, "per_step": True}
    texts = []
    for ids in prompts:
        drafts.clear()
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            speculative=False if head is None else speculative,
        )
        # The pass over the prompt, which comes first, has no draft.
        accepted = [] if head is None else output.speculation.rows[0].per_step_accepted[1:]
        texts.append(Text(output.sequences[0, len(ids) :].tolist(), drafts[: len(accepted)], accepted))
    return texts


def noting(drafter: Any, drafts: list[list[int]]) -> Any:
    """The drafter, which adds each draft to a list."""

    class Noting(type(drafter)):
        def propose(self, context: Any, budget: Any) -> Any:
            tree = super().propose(context, budget)
            drafts.append(tree.tokens[0].tolist())
            return tree

    drafter.__class__ = Noting
    return drafter
