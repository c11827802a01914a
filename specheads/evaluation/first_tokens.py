"""The joint law of the first tokens after a prompt, from the target's own scores, in cells that a sample can be counted into.

Every token that is probable enough along the way has a cell or goes on; after each text that goes on, all other tokens share a
cell. The scores are those that plain `generate` prepares, all its processors included: texts are forced up to there.

Shapes: R texts, D tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ..mixin import SpeculativeGenerationMixin
from .runs import end_ids
from .shared_prompt import SharedPrompt

REST = -1  # ends the key of a cell that all other tokens share
Text = tuple[int, ...]


@dataclass(frozen=True)
class FirstTokens:
    """The law of the first tokens.

    Args:
        tokens: How many.
        cells: The probability of each cell; they sum to 1.
    """

    tokens: int
    cells: dict[Text, float]

    def cell_of(self, row: Sequence[int]) -> Text:
        """The cell of a sampled text."""
        text = tuple(row[: self.tokens])
        ends = ((*text[:length], REST) for length in range(len(text) - 1, -1, -1))
        return text if text in self.cells else next(cell for cell in ends if cell in self.cells)

    def count(self, rows: Iterable[Sequence[int]]) -> Counter[Text]:
        """How many of some sampled texts are in each cell."""
        return Counter(map(self.cell_of, rows))


def first_tokens(
    model: Any, inputs: Mapping[str, Tensor], tokens: int, least: float, batch_size: int, **arguments: Any
) -> FirstTokens:
    """Works out the law.

    Args:
        model: The target.
        inputs: One prompt, as a batch of a single row.
        tokens: How many tokens.
        least: How probable a text must be at least to have a cell of its own.
        batch_size: How many texts are run at once.
        **arguments: Of `generate`, as the samples are drawn with.
    """
    ends = end_ids(model)
    prompt = SharedPrompt(model, inputs)
    cells: dict[Text, float] = {}
    going: dict[Text, float] = {(): 1.0}
    for length in range(1, tokens + 1):
        grown: dict[Text, float] = {}
        every = list(going)
        for texts in (every[start : start + batch_size] for start in range(0, len(every), batch_size)):
            for text, law in zip(texts, next_laws(model, prompt, texts, **arguments), strict=True):
                joint = law * going[text]
                is_kept = joint >= least
                cells[(*text, REST)] = joint[~is_kept].sum().item()
                for token in is_kept.nonzero().flatten().tolist():
                    is_whole = length == tokens or token in ends
                    (cells if is_whole else grown)[(*text, token)] = joint[token].item()
        going = grown
    return FirstTokens(tokens, cells)


def next_laws(model: Any, prompt: SharedPrompt, texts: Sequence[Text], **arguments: Any) -> Tensor:
    """The laws `[R, V]` of the token after a prompt and each of some texts of one length, in double precision."""
    ids = prompt.inputs["input_ids"]
    start = 1 if model.config.is_encoder_decoder else ids.shape[1]
    forced = torch.tensor(texts, dtype=torch.long, device=ids.device).view(len(texts), -1)
    if isinstance(model, SpeculativeGenerationMixin):
        arguments["speculative"] = False
    output = model.generate(
        **prompt.for_texts(len(texts)),
        **arguments,
        do_sample=True,
        num_return_sequences=len(texts),
        logits_processor=LogitsProcessorList([Forced(forced, start)]),
        stopping_criteria=StoppingCriteriaList([StopAt(start + forced.shape[1] + 1)]),
        output_scores=True,
        return_dict_in_generate=True,
    )
    scores: Tensor = output.scores[forced.shape[1]]
    return scores.double().softmax(dim=-1).cpu()


class Forced(LogitsProcessor):
    """Lets a text have certain first tokens.

    Args:
        texts: `[R, D]` those of each row.
        start: The width of the ids before them.
    """

    def __init__(self, texts: Tensor, start: int):
        self.texts = texts
        self.start = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[R, V]` of the forced token, or as they were."""
        step = input_ids.shape[1] - self.start
        if step >= self.texts.shape[1]:
            return scores
        return torch.full_like(scores, -torch.inf).scatter_(1, self.texts[:, step : step + 1], 0.0)


class StopAt(StoppingCriteria):
    """Ends all rows at a width, without being a limit that processors know of."""

    def __init__(self, width: int):
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each row `[R]` is done."""
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.width, device=input_ids.device)
