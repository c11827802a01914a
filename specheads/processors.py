"""Logits processors at the nodes of a draft tree, each node with its own prefix.

Plain `generate` calls the processors once a step with the ids `[B, L]` and scores `[B, V]` of the whole batch. A node stands
for a step of one row, so it must see what that row would have shown: the padded prompt, what is committed, and the node's
path. Three kinds are told apart, by exact type:

- *pointwise*: a function of the scores alone;
- *prefix*: a function of the row's ids, and at most of settings that belong to the row, which are selected for it;
- *sequential*: everything else: processors with a state, and those this library cannot know, a function of the user's like
  `prefix_allowed_tokens_fn` among them. They are called as plain `generate` calls them, one step after another with the whole
  batch, along what is committed only, ended rows and their padding among it.

Shapes: R lines of a call, V vocabulary, L ids.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers.generation.logits_process as hf
from torch import Tensor
from transformers import LogitsProcessorList

from .blocks import best_token, block_maxima, keep_best
from .sequences import Sequences
from .tree import DraftTree


def _classes(*names: str) -> frozenset[type]:
    # A class that this version of transformers does not have cannot be passed either.
    return frozenset(getattr(hf, name) for name in names if hasattr(hf, name))


POINTWISE = _classes(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "SuppressTokensLogitsProcessor",
)

# Of these, the ones that take all tokens alike: a part of the vocabulary can go through them alone.
IMPARTIAL = POINTWISE - _classes("SuppressTokensLogitsProcessor")

PREFIX = _classes(
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
)


def _repetition_rows(processor: Any, rows: Sequence[int], batch_size: int) -> Any:
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, Tensor):
        return processor
    selected = copy.copy(processor)
    selected.prompt_ignore_length = ignored[list(rows)]
    return selected


def _encoder_repetition_rows(processor: Any, rows: Sequence[int], batch_size: int) -> Any:
    selected = copy.copy(processor)
    repeats = batch_size // processor.encoder_input_ids.shape[0]
    selected.encoder_input_ids = processor.encoder_input_ids[[row // repeats for row in rows]]
    return selected


def _encoder_ngram_rows(processor: Any, rows: Sequence[int], batch_size: int) -> Any:
    selected = copy.copy(processor)
    repeats = batch_size // processor.batch_size
    selected.generated_ngrams = [processor.generated_ngrams[row // repeats] for row in rows]
    selected.batch_size = len(rows)
    return selected


def _top_k(processor: Any, scores: Tensor) -> Tensor | None:
    return keep_best(scores, processor.top_k) if processor.filter_value == -torch.inf else None


# Quicker ways to the same values, `None` where these scores need the processor itself.
QUICK: dict[type, Callable[[Any, Tensor], Tensor | None]] = {hf.TopKLogitsWarper: _top_k}

Selector = Callable[[Any, Sequence[int], int], Any]
ROW_SELECTORS: dict[type, Selector] = {
    hf.RepetitionPenaltyLogitsProcessor: _repetition_rows,
    hf.EncoderRepetitionPenaltyLogitsProcessor: _encoder_repetition_rows,
    hf.EncoderNoRepeatNGramLogitsProcessor: _encoder_ngram_rows,
}


def is_stateless(processor: Any) -> bool:
    """Whether a processor is known to be a function of a row's ids and scores."""
    return type(processor) in POINTWISE or type(processor) in PREFIX or type(processor) in ROW_SELECTORS


class ScoreProcessors:
    """The processors of one call, applied to any lines of its batch.

    Args:
        processors: What `generate` prepared, in order.
        sequences: The ids of the batch.
    """

    def __init__(self, processors: LogitsProcessorList, sequences: Sequences):
        self.processors = processors
        self.sequences = sequences
        self.is_sequential = not all(map(is_stateless, processors))
        self.is_pointwise = all(type(processor) in POINTWISE for processor in processors)
        self.is_impartial = all(type(processor) in IMPARTIAL for processor in processors)
        self.is_empty = len(processors) == 0

    def __call__(self, rows: Sequence[int], drafted: Tensor, scores: Tensor) -> Tensor:
        """Processed scores.

        Args:
            rows: The batch row of each line.
            drafted: `[R, D]` the tokens of each line after what its row has committed.
            scores: `[R, V]` raw logits.

        Returns:
            `[R, V]`.
        """
        if self.is_empty:
            return scores
        if self.is_pointwise:
            for processor in self.processors:
                scores = _processed(processor, drafted, scores)
            return scores
        if self.is_sequential:
            return self._whole_batch(rows, drafted, scores)
        by_width: dict[int, list[int]] = defaultdict(list)
        for line, row in enumerate(rows):
            by_width[self.sequences.widths[row]].append(line)
        if len(by_width) == 1:
            return self._same_width(rows, drafted, scores)
        processed = torch.empty_like(scores)
        for lines in by_width.values():
            processed[lines] = self._same_width([rows[i] for i in lines], drafted[lines], scores[lines])
        return processed

    def _same_width(self, rows: Sequence[int], drafted: Tensor, scores: Tensor) -> Tensor:
        ids = self.sequences.prefixes(rows, drafted)
        for processor in self.processors:
            select = ROW_SELECTORS.get(type(processor))
            own = select(processor, rows, self.sequences.batch_size) if select else processor
            scores = _processed(own, ids, scores)
        return scores

    def _whole_batch(self, rows: Sequence[int], drafted: Tensor, scores: Tensor) -> Tensor:
        # Rows are in step, so these are all of them. The tokens of this round are among the ids already: sequential walks
        # append them level by level.
        return self.processors(self.sequences.prefixes(rows, drafted[:0]).contiguous(), scores)


def _processed(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    quick = QUICK.get(type(processor))
    done = None if quick is None else quick(processor, scores)
    return processor(ids, scores) if done is None else done


class RoundLaws:
    """The target's processed scores at the nodes of one round (`verify.NodeLaws`).

    Args:
        logits: `[B, N + 1, V]` what the target's pass gave.
        rows: The batch row of each line.
        processors: The call's processors.
        records: Whether to keep the scores for `scores_at`.

    Attributes:
        maxima: `[B, N + 1, D]` the logits' `block_maxima`, once they were looked for.
    """

    def __init__(self, logits: Tensor, rows: Sequence[int], processors: ScoreProcessors, records: bool = False):
        self.logits = logits
        self.rows = rows
        self.processors = processors
        self.needs_prefixes = not processors.is_pointwise
        self.padded = {line for line, row in enumerate(rows) if processors.sequences.is_padded(row)}
        self.ended = {line for line, row in enumerate(rows) if processors.sequences.finished[row]}
        self.records = records
        self.recorded: dict[tuple[int, int], Tensor] = {}
        self.maxima: Tensor | None = None

    def at(self, lines: Sequence[int], nodes: Tensor, drafted: Tensor) -> Tensor:
        """Scores `[R, V]` of one node per line."""
        whole = len(lines) == len(self.rows)
        if whole and not drafted.shape[1] and not self.needs_prefixes:
            logits = self.logits[:, 0]  # the roots; what is pointwise does not write into what it is given
        else:
            # Indices made on the device: to send them from the host would be to wait for it.
            index = torch.arange(len(lines), device=nodes.device) if whole else torch.tensor(lines, device=nodes.device)
            logits = self.logits[index, nodes]
        scores = self.processors([self.rows[i] for i in lines], drafted, in_full_precision(logits))
        if self.records:
            self.recorded.update(zip(zip(lines, nodes.tolist(), strict=True), scores.unbind(), strict=True))
        return self._padded(lines, scores)

    def everywhere(self, tree: DraftTree) -> Tensor:
        """Scores `[B, N + 1, V]` of all nodes."""
        scores = self._everywhere(tree)
        if self.records:
            self.recorded = {(line, node): own for line, row in enumerate(scores) for node, own in enumerate(row)}
        return self._padded(range(len(self.rows)), scores)

    def best(self, tree: DraftTree) -> Tensor:
        """The most probable token `[B, N + 1]` at every node; raw logits keep their precision, as only their order counts."""
        if not self.processors.is_empty or self.records or self.padded:
            return best_token(self.everywhere(tree))
        if self.logits.device.type == "cpu":
            self.maxima = block_maxima(self.logits)
        return best_token(self.logits, self.maxima)

    def scores_at(self, line: int, nodes: Sequence[int]) -> Tensor:
        """The recorded scores `[K, V]` of some nodes of a line that the verification walked through."""
        return torch.stack([self.recorded[line, node] for node in nodes])

    def _everywhere(self, tree: DraftTree) -> Tensor:
        scores = in_full_precision(self.logits)
        if self.processors.is_empty:
            return scores
        if self.processors.is_pointwise:
            return self.processors(self.rows, tree.tokens, scores.flatten(0, 1)).view_as(scores)
        processed = torch.empty_like(scores)
        for lines, nodes, drafted in nodes_by_depth(tree):
            rows = [self.rows[i] for i in lines]
            processed[lines, nodes] = self.processors(rows, drafted, scores[lines, nodes])
        return processed

    def _padded(self, lines: Sequence[int], scores: Tensor) -> Tensor:
        """Scores `[R, ..., V]` where rows that have ended say nothing but padding."""
        sequences = self.processors.sequences
        ended = [i for i, line in enumerate(lines) if sequences.is_padded(self.rows[line])]
        if ended:
            scores = scores.clone()
            scores[ended] = -torch.inf
            scores[ended, ..., sequences.pad_token] = 0
        return scores


def in_full_precision(logits: Tensor) -> Tensor:
    """Logits in single precision, or double if they are."""
    return logits if logits.dtype == torch.double else logits.float()


def nodes_by_depth(tree: DraftTree) -> list[tuple[list[int], list[int], Tensor]]:
    """All nodes, root included, one depth at a time: their lines, their indices and their paths' tokens `[R, depth]`."""
    visible, depths = tree.visible.tolist(), tree.depths.tolist()
    groups = []
    for depth in range(tree.depth + 1):
        places = [
            (line, node)
            for line, row in enumerate(depths)
            for node, own in enumerate(row)
            if own == depth and (depth or not node)
        ]
        if places:
            lines, nodes = [line for line, _ in places], [node for _, node in places]
            # A node's ancestors in order of index are its path from the root; the root's own token is committed.
            paths = [[j - 1 for j in range(1, node + 1) if visible[line][node][j]] for line, node in places]
            index = torch.tensor(paths, dtype=torch.long, device=tree.tokens.device).view(len(places), depth)
            groups.append((lines, nodes, tree.tokens[torch.tensor(lines, device=index.device)].gather(1, index)))
    return groups
