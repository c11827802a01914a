"""Trains a draft head for a target: `train/heads.py`, from data and a recipe to a folder that `specheads.enable` loads."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.prompts import InputError
from .arguments import DataArguments, HeadArguments, HeadTrainingArguments
from .command_line import parse

PROGRAM = "heads.py"
INTERRUPTED = 130  # what a shell reports for Ctrl-C
KINDS = (HeadArguments, DataArguments, HeadTrainingArguments)

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 2 for input that cannot be used or output that cannot be written, 130 for an interruption.
    """
    try:
        head, data, training = parse(KINDS, PROGRAM, __doc__, sys.argv[1:] if arguments is None else arguments)
        train(head, data, training)
    except (InputError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted; --resume_from_checkpoint true goes on from the last checkpoint.", file=sys.stderr)
        return INTERRUPTED
    return 0


def train(head: HeadArguments, data: DataArguments, args: HeadTrainingArguments) -> Any:
    """Trains a head and saves it.

    Args:
        head: The target and the head.
        data: The data.
        args: How to train.

    Returns:
        The trainer.

    Raises:
        InputError: if something of the options cannot be used.
        CheckpointError: if the folder cannot be written.
    """
    from .checkpoints import checkpoint_to_resume
    from .corpus import load_corpus, prompts_of
    from .data import Collator
    from .draft_vocabulary import most_frequent, special_tokens, token_counts
    from .estimates import estimate
    from .step import DraftTraining
    from .teacher import Teacher
    from .trainer import HeadTrainer
    from .warm_start import make_head, trained_head

    _set_up_logging(args)
    resumed = checkpoint_to_resume(Path(args.output_dir or "."), args.resume_from_checkpoint)
    target, tokenizer = load_target(head, args)
    corpus = load_corpus(data, tokenizer, target, args.seed)
    if head.head_name_or_path is not None:
        made = trained_head(head.head_name_or_path, target, tokenizer)
    else:
        draft_tokens = None
        if head.draft_vocab_size is not None:
            counts = token_counts(corpus.train, target.get_output_embeddings().weight.shape[0])
            draft_tokens = most_frequent(counts, head.draft_vocab_size, special_tokens(tokenizer, target))
            known = counts[draft_tokens].sum() / counts.sum().clamp(min=1)
            logger.info("The draft vocabulary has %.2f%% of the tokens that the assistant wrote.", 100 * float(known))
        made = make_head(head, target, tokenizer, draft_tokens, args.depth)
    drafts = DraftTraining(made, Teacher(target, made.config.feature_layers), args.settings)
    prompts = [] if corpus.evaluation is None or data.streaming else prompts_of(corpus.evaluation, args.generate_prompts)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    trainer = HeadTrainer(drafts, args, corpus.train, Collator(pad), corpus.evaluation, prompts)
    if args.should_log:
        first = next(iter(trainer.get_train_dataloader()))
        logger.info("Before the run: %s", estimate(drafts, [first], args, corpus.written))
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    trainer.save_model()
    return trainer


def load_target(head: HeadArguments, args: HeadTrainingArguments) -> tuple[Any, Any]:
    """The target, frozen, where training is, and its tokenizer.

    Raises:
        InputError: if it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, revision = head.model_name_or_path, head.model_revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        target = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=head.dtype, attn_implementation=head.attn_implementation
        )
    except (OSError, ValueError) as error:
        raise InputError(f"The target {name} cannot be loaded: {error}") from error
    return target.eval().requires_grad_(False).to(args.device), tokenizer


def _set_up_logging(args: HeadTrainingArguments) -> None:
    level = logging.INFO if args.should_log else logging.WARNING
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger(__package__).setLevel(level)
