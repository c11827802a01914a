"""Small tokenizers that differ, and models to go with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..tiny import perturbed

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"
TEXT = (
    "The quick brown fox jumps over the lazy dog. In a village of La Mancha, the name of which I have no desire to call to "
    "mind, there lived not long since one of those gentlemen that keep a lance in the lance-rack, an old buckler, a lean "
    "hack, and a greyhound for coursing. Ça va, naïve café — 東京 and back again: def main(): return 42."
)


def spelling(tokens: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of letters, and of the pairs that are merged."""
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level(size: int, text: str = TEXT, end: str = "<end>") -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's, trained on a text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[end], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def reworded(target: PreTrainedModel, places: Sequence[int], size: int, amount: float = 0.05) -> PreTrainedModel:
    """A model close to a target whose vocabulary is another: its token `places[i]` is the target's i; -1 if it has none."""
    draft = perturbed(target, amount)
    rows = [table.weight.detach().clone() for table in (draft.get_input_embeddings(), draft.get_output_embeddings())]
    draft.resize_token_embeddings(size, mean_resizing=False)
    generator = torch.Generator().manual_seed(3)
    kept = [(ours, theirs) for ours, theirs in enumerate(places) if theirs >= 0]
    ours, theirs = (torch.tensor(column) for column in zip(*kept, strict=True))
    with torch.no_grad():
        for table, old in zip((draft.get_input_embeddings(), draft.get_output_embeddings()), rows, strict=True):
            table.weight.normal_(std=0.1, generator=generator)
            table.weight[theirs] = old[ours]
    return draft
