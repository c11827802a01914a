"""Trains a draft head for a target: `train/heads.py`, from data and a recipe to a folder that `specheads.enable` loads."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import set_seed

from ..evaluation.bench import check_place
from ..evaluation.prompts import InputError
from ..heads import DraftHead, EagleConfig, MedusaHeads
from ..heads.target_parts import parts_of
from ..interruption import INTERRUPTED
from .arguments import DataArguments, HeadArguments, HeadTrainingArguments
from .batch import TrainingBatch
from .checkpoints import check_same_run, checkpoint_to_resume
from .command_line import parse
from .copying import key_heads, start_copying
from .corpus import Corpus, load_corpus, prompts_of
from .data import Collator, WithPrompts
from .data_provenance import warn_of_other_writers
from .draft_vocabulary import most_frequent, special_tokens, token_counts
from .estimates import estimate
from .evaluating import merged
from .medusa2 import AdaptedTeacher, JointTraining
from .record import data_description, measured_results, training_record
from .step import DraftTraining
from .stored import collate_stored, stored_texts
from .teacher import Teacher
from .trainer import HeadTrainer
from .warm_start import make_head, trained_head

KINDS = (HeadArguments, DataArguments, HeadTrainingArguments)

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 2 for input that cannot be used or output that cannot be written, 130 for an interruption.
    """
    program = "heads.py" if arguments is None else "specheads train"
    try:
        head, data, training = parse(KINDS, program, __doc__, sys.argv[1:] if arguments is None else arguments)
        train(head, data, training)
    except (InputError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted; --resume_from_checkpoint true goes on from the last checkpoint.", file=sys.stderr)
        return INTERRUPTED
    return 0


def train(head: HeadArguments, data: DataArguments, args: HeadTrainingArguments, callbacks: Sequence[Any] = ()) -> Any:
    """Trains a head and saves it.

    Args:
        head: The target and the head.
        data: The data.
        args: How to train.
        callbacks: Of `transformers`, for the trainer.

    Returns:
        The trainer.

    Raises:
        InputError: if something of the options cannot be used.
        CheckpointError: if the folder cannot be written.
    """
    _set_up_logging(args)
    resumed = checkpoint_to_resume(Path(args.output_dir or "."), args.resume_from_checkpoint)
    trainer, corpus = _trainer(head, data, args, callbacks)
    trainer.run = {
        "data": corpus.fingerprint,
        "examples_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "train_sampling_strategy": args.train_sampling_strategy,
        "seed": args.seed,
    }
    if resumed is not None:
        check_same_run(resumed, trainer.run)
    if args.should_log:
        first = next(iter(trainer.get_train_dataloader()))
        logger.info("Before the run: %s", estimate(trainer.drafts, [first], args, _learned(data, corpus)))
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    trainer.beside["training"] = training_record(head, data, args, corpus.fingerprint, trainer.state.log_history)
    if corpus.tasks and not data.streaming:
        _measure_tasks(trainer, corpus)
    trainer.save_model()
    logger.info("The head is in %s: specheads.enable(model, drafter=%r).", args.output_dir, str(args.output_dir))
    return trainer


def _learned(data: DataArguments, corpus: Corpus) -> int | None:
    return corpus.tokens if data.learn_prompts else corpus.written


def _measure_tasks(trainer: HeadTrainer, corpus: Corpus) -> None:
    """Measures each task for the card, and for Medusa heads what the shape of their draft trees follows from."""
    measured = {}
    for task, texts in corpus.tasks.items():
        trainer.prompts = prompts_of(texts, trainer.args.generate_prompts)
        trainer.evaluate(texts, metric_key_prefix=f"task_{Path(task).stem}")
        assert trainer.measured is not None
        measured[Path(task).name] = trainer.measured
    if isinstance(trainer.head, MedusaHeads) and trainer.args.depth == trainer.head.config.num_heads:
        trainer.head.config.head_accuracies = merged([found.evaluation for found in measured.values()]).rank_accuracies
    target = trainer.drafts.teacher.target
    trainer.beside["results"] = measured_results(measured, trainer.args, target, corpus.evaluation_fingerprint)


def _trainer(
    head: HeadArguments, data: DataArguments, args: HeadTrainingArguments, callbacks: Sequence[Any]
) -> tuple[HeadTrainer, Corpus]:
    target, tokenizer = load_target(head, args)
    corpus = load_corpus(data, tokenizer, target, args.seed)
    made = _head(head, args, target, tokenizer, corpus)
    if isinstance(made.config, EagleConfig):
        made.config.suggest(args.depth)
    made.config.training_data = data_description(data, corpus.template_arguments)
    warn_of_other_writers(data.dataset_name, made.config.base_model or {})
    drafts = _in_training(head, args, made, target)
    collator: Any = Collator(_pad_token(tokenizer))
    prompts = [] if corpus.evaluation is None or data.streaming else prompts_of(corpus.evaluation, args.generate_prompts)
    texts, collate = corpus.train, collator
    if data.feature_store is not None:
        if head.lora_rank:
            raise InputError(
                "An adapter changes the target's hidden states, so they cannot be stored; leave out `feature_store`."
            )
        texts = stored_texts(
            data.feature_store, drafts.teacher, texts, str(corpus.fingerprint), corpus.tokens or 0, data.feature_store_gib, args
        )
        collate = collate_stored
    if data.learn_prompts:
        collate = WithPrompts(collate)
    return HeadTrainer(drafts, args, texts, collate, corpus.evaluation, collator, prompts, list(callbacks)), corpus


def _in_training(head: HeadArguments, args: HeadTrainingArguments, made: DraftHead, target: Any) -> DraftTraining:
    if not head.lora_rank:
        return DraftTraining(made, Teacher(target, made.config.feature_layers), args.settings)
    from peft import LoraConfig

    adapter = LoraConfig(r=head.lora_rank, lora_alpha=head.lora_alpha, target_modules=head.lora_target_modules)
    teacher = AdaptedTeacher(target, made.config.feature_layers)
    return JointTraining(made, teacher, args.settings, adapter, args.self_distillation)


def _head(head: HeadArguments, args: HeadTrainingArguments, target: Any, tokenizer: Any, corpus: Corpus) -> DraftHead:
    if head.head_name_or_path is not None:
        return trained_head(head.head_name_or_path, target, tokenizer)
    draft_tokens = None
    if head.draft_vocab_size is not None:
        counts = token_counts(corpus.train, parts_of(target).vocab_size)
        draft_tokens = most_frequent(counts, head.draft_vocab_size, special_tokens(tokenizer, target))
        known = counts[draft_tokens].sum() / counts.sum().clamp(min=1)
        logger.info("The draft vocabulary has %.2f%% of the tokens that the assistant wrote.", 100 * float(known))
    set_seed(args.seed)  # the same fresh weights in every process, and in every run
    made = make_head(head, target, tokenizer, draft_tokens, args.depth)
    groups = _copying_groups(head, made)
    if groups:
        texts = _batches(corpus.train, _pad_token(tokenizer), target.device)
        start_copying(made, Teacher(target, made.config.feature_layers), texts, groups)
    return made


def _copying_groups(head: HeadArguments, made: DraftHead) -> int:
    """How many key heads begin as copiers; where it is not said, one if there are others and it is possible."""
    if head.copying_groups is not None or head.head != "eagle3" or not head.warm_start:
        return head.copying_groups or 0
    try:
        count = key_heads(made)
    except InputError as reason:
        logger.info("No attention heads start by copying from earlier text. %s", reason)
        return 0
    return min(1, count - 1)


def _batches(dataset: Any, pad_token_id: int, device: Any) -> Iterator[TrainingBatch]:
    collator, examples = Collator(pad_token_id), iter(dataset)
    while some := list(islice(examples, 8)):
        yield TrainingBatch(**{name: value.to(device) for name, value in collator(some).items()})


def _pad_token(tokenizer: Any) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0


def load_target(head: HeadArguments, args: HeadTrainingArguments) -> tuple[Any, Any]:
    """The target, frozen, where training is, and its tokenizer.

    Raises:
        InputError: if it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, revision = head.model_name_or_path, head.model_revision
    check_place(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        target = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=head.dtype, attn_implementation=head.attn_implementation
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"The target {name} cannot be loaded: {error}") from error
    return target.eval().requires_grad_(False).to(args.device), tokenizer


def _set_up_logging(args: HeadTrainingArguments) -> None:
    level = logging.INFO if args.should_log else logging.WARNING
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger(__package__).setLevel(level)
