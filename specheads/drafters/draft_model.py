"""A smaller model with the target's tokenizer as the drafter (Leviathan et al. 2023); see `other_vocabulary` for another one.

It samples with a law that is known, so ratios can be verified; or it takes the most probable tokens. It reads a text when it is
first to draft, so one that never pays costs nothing. Its cache follows the target's: what is rejected is forgotten, what the
target added is fed with the next draft. For an encoder-decoder it may be one too, whose encoder reads the same; or
decoder-only, and then it reads the encoder's tokens before those of the decoder.

Shapes: B lines, M tokens that the draft model has not seen, V the target's vocabulary, V' its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper
from transformers.modeling_outputs import BaseModelOutput

from ..families import family_of, position_limit
from ..processors import POINTWISE, ScoreProcessors, in_full_precision, is_stateless
from ..target import ModelRunner, run_prompt
from ..tree import DraftTree
from .base import Accepted, Budget, DraftContext
from .growth import grow_chain, grow_tree, within_depths
from .known_text import encoder_tokens


class DraftModelDrafter:
    """Drafts with a model.

    Args:
        model: The draft model. It is not changed.
        target: The model it drafts for.
        tokenizer: The target's tokenizer, to compare where the vocabularies are of different sizes.
        assistant_tokenizer: The draft model's.

    Raises:
        TypeError: if the model does not generate.
        ValueError: if the family is not supported, it is an encoder-decoder and the target is not, or their tokenizers differ.
    """

    weighs_nodes = False
    own_ids: Tensor | None = None  # its scores are over the target's vocabulary

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, tokenizer: Any = None, assistant_tokenizer: Any = None):
        if not model.can_generate():
            raise TypeError(f"A draft model must be one that generates, got {type(model).__name__}.")
        self._check_tokenizers(target, model, tokenizer, assistant_tokenizer)
        if model.config.is_encoder_decoder and not target.config.is_encoder_decoder:
            raise ValueError(
                "The draft model is an encoder-decoder and the target decoder-only, so there is nothing that its encoder could "
                "read; use a decoder-only draft model."
            )
        self.model = model
        self.family = family_of(model)
        self.needs_step = not self.family.takes_trees
        self.step_cost = model.num_parameters() / target.num_parameters()
        self.runner: ModelRunner | None = None

    def begin(self, context: DraftContext) -> None:
        """Sees whether the prompts leave the draft model room.

        Raises:
            ValueError: if the draft model has an encoder and the call does not say what it should read.
        """
        if self.model.config.is_encoder_decoder and context.encoder_inputs is None:
            name = self.model.main_input_name
            raise ValueError(f"The draft model's encoder needs the `{name}`, and this call gives `encoder_outputs` only.")
        self.processors = draft_processors(context)
        self.position_limit = position_limit(self.model)
        if self.position_limit is None:  # positions without a table do not end, but those beyond were not trained
            text = self.model.config.get_text_config(decoder=True)
            self.position_limit = getattr(text, "max_position_embeddings", None)
        self.runner = None
        self.padding: list[int] = []  # per line, of what the draft model has read
        self.sources = self._sources(context)
        longest = max(self._length(context, line) for line in range(len(context.rows)))
        self.has_room = self.position_limit is None or longest < self.position_limit

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """A sampled or most probable chain, or a tree if the budget has more nodes than depth."""
        depth = self.depth_within_limit(context, budget)
        if depth == 0:
            return DraftTree.empty(len(context.rows), context.device)
        logits = self.start(context)
        if context.takes_trees and self.family.takes_trees and budget.nodes > depth:
            grown = grow_tree(self, context, logits, self.pending, depth, budget.nodes)
        else:
            grown = grow_chain(self, context, logits, self.pending, depth)
        self.slot_of = grown.slot_of
        return within_depths(grown.tree, budget.depths)

    def start(self, context: DraftContext) -> Tensor:
        """Feeds what the draft model has not seen. Returns the logits `[B, V']` after each row's last token."""
        logits, self.pending = self._catch_up(context)
        return logits

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Keeps the accepted nodes that the draft model has run on."""
        if self.runner is None or not self.runner.written:
            return
        slots = self.slot_of.tolist()
        kept: list[list[int]] = []
        for line, path in enumerate(accepted.paths):
            fed = [slots[line][node - 1] for node in path if slots[line][node - 1] >= 0]
            # The row's last token is fed again with the next draft, whose law it must give.
            room = self._length(context, line) - 1 - self._own_length(line)
            kept.append([*range(self.pending), *fed][:room])
        self.runner.commit(kept)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Drops the other rows from the draft model's cache."""
        if self.runner is not None:
            self.runner.keep_rows(lines)
            self.padding = [self.padding[line] for line in lines]

    def scores(self, context: DraftContext, lines: Sequence[int], drafted: Tensor, logits: Tensor) -> Tensor:
        """The draft model's processed scores over the target's vocabulary.

        Args:
            context: The call.
            lines: The line of each of R nodes.
            drafted: `[R, D]` the tokens of each node's path.
            logits: `[R, V']` the draft model's logits, of its own vocabulary size.

        Returns:
            `[R, V]`.
        """
        logits = in_full_precision(logits.to(context.device))
        missing = context.vocab_size - logits.shape[-1]
        # Vocabularies are padded to different sizes; the tokens themselves are the same.
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
        return self.processors([context.rows[line] for line in lines], drafted, logits)

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """One more token of a chain (`DraftSource.follow`)."""
        visible = torch.ones(len(tokens), 1, depth + 1, dtype=torch.bool, device=tokens.device)
        return self.extend(tokens[:, None], torch.full_like(tokens, depth)[:, None], visible)[:, 0]

    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
        """One pass of the draft model over new nodes (`ModelRunner.extend`)."""
        return self._run(self._in_own_ids(tokens), depths, visible)

    def _check_tokenizers(self, target: Any, draft: Any, tokenizer: Any, draft_tokenizer: Any) -> None:
        """Refuses a draft model with another tokenizer, as far as can be told."""
        _check_same_tokenizer(target, draft, tokenizer, draft_tokenizer)

    def _text(self, context: DraftContext, line: int, start: int = 0) -> list[int]:
        """A line's tokens from `start` on, as the draft model reads them."""
        last, source = self._last_token(), self.sources[context.rows[line]]
        tokens = source[start:] + context.tokens(line, max(0, start - len(source)))
        return [min(token, last) for token in tokens]

    def _length(self, context: DraftContext, line: int) -> int:
        """How many tokens the line has, as the draft model reads them."""
        return len(self.sources[context.rows[line]]) + context.length(line)

    def _sources(self, context: DraftContext) -> list[list[int]]:
        """Per batch row, what a draft model without an encoder reads before the text: what the target's encoder reads."""
        lines = range(len(context.rows))
        if self.model.config.is_encoder_decoder:
            return [[] for _ in lines]
        return [encoder_tokens(context, line) for line in lines]

    def _in_own_ids(self, tokens: Tensor) -> Tensor:
        """Drafted tokens, given by the target's ids, by the draft model's."""
        return tokens.clamp(max=self._last_token())

    def _run(self, ids: Tensor, depths: Tensor, visible: Tensor) -> Tensor:
        """One pass of the draft model over tokens of its own (`ModelRunner.extend`)."""
        assert self.runner is not None
        return self.runner.extend(ids, depths, visible).logits

    def _own_length(self, line: int) -> int:
        """How many of a line's tokens the draft model has seen."""
        assert self.runner is not None
        return self.runner.lengths[line] - self.padding[line]

    def _device(self, context: DraftContext) -> torch.device:
        """Where the draft model reads ids; weights that are offloaded are nowhere, and are fetched to where the ids are."""
        device = self.model.device
        return context.device if device.type == "meta" else device

    def _last_token(self) -> int:
        """The greatest id that the draft model can read: a target with more padding may say some without an embedding."""
        return self.model.get_input_embeddings().weight.shape[0] - 1

    def depth_within_limit(self, context: DraftContext, budget: Budget) -> int:
        """How deep the draft model's positions let it draft; not at all if the prompt left it none."""
        if not self.has_room:
            return 0
        if self.position_limit is None:
            return budget.depth
        longest = max(self._length(context, line) for line in range(len(context.rows)))
        return max(0, min(budget.depth, self.position_limit - longest))

    def _open(self, context: DraftContext) -> list[list[int]]:
        """Runs the draft model over what there is, each row's last token excepted; returns what it has read."""
        read = [self._text(context, line) for line in range(len(context.rows))]
        read = [text[: max(1, len(text) - 1)] for text in read]
        ids, mask = _left_padded(read, self._device(context))
        most = max(context.sequences.remaining(row) for row in context.rows)
        room = most + context.config.draft_tokens + (context.config.tree_nodes or 0) + 2
        self.padding = [ids.shape[1] - len(text) for text in read]
        self.runner = run_prompt(self.model, ids, mask, self._encoder_inputs(context), room)
        return read

    def _catch_up(self, context: DraftContext) -> tuple[Tensor, int]:
        """Feeds what the draft model has not seen. Returns the logits `[B, V]` after each row's last token, and M."""
        if self.runner is None:
            self._open(context)
        assert self.runner is not None
        lengths = [self._length(context, line) for line in range(len(context.rows))]
        while True:
            seen = [self._own_length(line) for line in range(len(lengths))]
            lag = max(length - own for length, own in zip(lengths, seen, strict=True))
            size = max(1, min(lag, *lengths))
            # Rows that lag less are fed tokens they have seen: the same keys and values in the same slots.
            starts = [min(own, length - size) for own, length in zip(seen, lengths, strict=True)]
            self.runner.rewind([start + padding for start, padding in zip(starts, self.padding, strict=True)])
            tokens = [self._text(context, line, start)[:size] for line, start in enumerate(starts)]
            ids = torch.tensor(tokens, device=self._device(context))
            order = torch.arange(size, device=ids.device)
            visible = (order[:, None] >= order[None, :]).expand(len(tokens), size, size)
            logits = self._run(ids, order.expand_as(ids), visible)
            if lag <= size:
                return logits[:, -1], size
            self.runner.commit([list(range(size))] * len(tokens))

    def _encoder_inputs(self, context: DraftContext) -> dict[str, Any]:
        if context.encoder_inputs is None or not self.model.config.is_encoder_decoder:
            return {}
        rows = torch.tensor(context.rows, device=context.encoder_inputs.device)
        given, mask = context.encoder_inputs[rows].to(self._device(context)), context.encoder_mask
        if given.is_floating_point():
            given = given.to(self.model.dtype)
        elif mask is None:
            mask = torch.ones_like(context.encoder_inputs)
        read = {} if mask is None else {"attention_mask": mask[rows.to(mask.device)].to(given.device)}
        encoder = self.model.get_encoder()
        states = encoder(**{encoder.main_input_name: given}, **read, return_dict=True).last_hidden_state
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=states), **read}


def draft_processors(context: DraftContext) -> ScoreProcessors:
    """The processors of a draft's law: the target's, once, with the draft's own temperature if one is set.

    Processors with a state are left out: they may be called along what is committed only. Any law keeps the output exact.
    """
    processors = LogitsProcessorList(p for p in context.processors.processors if is_stateless(p))
    temperature = context.config.draft_temperature
    if temperature and context.noise is not None:
        own = TemperatureLogitsWarper(float(temperature))
        places = [i for i, processor in enumerate(processors) if type(processor) is TemperatureLogitsWarper]
        if places:
            processors[places[0]] = own
        else:
            first = next((i for i, processor in enumerate(processors) if type(processor) in POINTWISE), len(processors))
            processors.insert(first, own)
    return ScoreProcessors(processors, context.sequences)


def _left_padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """`[B, P]` ids and, if the rows differ in length, their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    if min(map(len, rows)) == width:
        return ids, None
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)


def _check_same_tokenizer(target: Any, draft: Any, tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuses a draft model with another tokenizer, as far as can be told."""
    if tokenizer is not None and draft_tokenizer is not None:
        if tokenizer.get_vocab() != draft_tokenizer.get_vocab():
            raise ValueError(
                "The draft model's tokenizer differs from the target's; `specheads.load_drafter` makes a drafter that may."
            )
        return
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The draft model has a vocabulary of {sizes[1]} and the target one of {sizes[0]}; pass `tokenizer=` and "
            "`assistant_tokenizer=`, to tell whether only the padding differs, and to draft in spite of it if not."
        )
