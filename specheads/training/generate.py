"""Has the target write the answers that heads are trained on.

Takes the questions of a dataset, in any of the usual shapes, and writes a folder that the trainer, `datasets` and the Hub can
read. A run that was killed goes on with the same command, and gives the rows that it would have given.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from typing import Any

from ..evaluation.prompts import InputError
from ..evaluation.provenance import run_provenance
from ..interruption import INTERRUPTED
from .answers import Writer, answer
from .endpoint import EndpointWriter
from .generate_arguments import GenerateArguments
from .questions import Question, Questions, question_of
from .row_files import OutputFolder
from .sources import load_rows
from .target_writer import TargetWriter


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 2 for input that cannot be used or output that cannot be written, 130 for an interruption.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser(GenerateArguments, prog="generate.py", description=__doc__)
    try:
        (options,) = parser.parse_args_into_dataclasses(args=arguments)
        counts = generate_data(options)
    except (InputError, OSError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ngenerate.py: interrupted; the same command goes on from here.", file=sys.stderr)
        return INTERRUPTED
    cut = f"; {counts['cut']:,} reached --max_new_tokens" if counts["cut"] else ""
    print(f"{counts['rows']:,} answers, {counts['tokens']:,} tokens, in {options.output}{cut}.", file=sys.stderr)
    print(json.dumps(counts))
    return 0


def generate_data(options: GenerateArguments) -> dict[str, Any]:
    """Answers what is not answered yet.

    Args:
        options: The options of the command.

    Returns:
        How many rows there are now, what failed for which reason, and how many questions were left out.

    Raises:
        InputError: if something of the options cannot be used.
        OutputError: if the folder cannot be written.
    """
    rows = load_rows(options.dataset, options.split, options.subset, options.dataset_revision, options.streaming)
    excluded = frozenset(_keys(options.exclude))
    questions = Questions(rows, options.dataset, options.system, options.process, options.limit, excluded)
    output = OutputFolder(options.output, options.process)
    try:
        writer, target = _writer(options)
        output.check(_settings(options, target), run_provenance())
        with closing(_Progress(questions if options.streaming else list(questions), output)) as progress:
            for batch in _batches(progress.questions, options.batch_size or (256 if options.endpoint else 8)):
                _answer(batch, writer, output, options)
                progress.show()
        return {**output.counts, "duplicates": questions.duplicates, "excluded": questions.left_out}
    finally:
        output.close()


def _answer(batch: Sequence[Question], writer: Writer, output: OutputFolder, options: GenerateArguments) -> None:
    missing = [question for question in batch if question.key not in output.done]
    if not missing:
        return
    # On this machine a batch is written as a whole, so that its rows round as they would have without an interruption.
    asked = missing if options.endpoint else batch
    answers = answer(asked, writer, options.seed, keep_cut=not options.drop_cut)
    rows = [one.row for one in answers if one.written]
    output.append(rows, [one.failed for one in answers if not one.written])


def _writer(options: GenerateArguments) -> tuple[Writer, dict[str, Any]]:
    """Who writes, and what is known of the target."""
    if options.endpoint:
        key = os.environ.get(options.api_key_variable)
        arguments = options.arguments_of_template
        writer = EndpointWriter(options.endpoint, options.model, arguments, options.sampling, options.concurrency, key)
        return writer, {"name_or_path": options.model, "revision": options.revision}
    return _target_writer(options)


def _target_writer(options: GenerateArguments) -> tuple[Writer, dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..evaluation.bench import check_place
    from ..heads.provenance import describe_target
    from ..mixin import enable

    check_place(options.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model, revision=options.revision)
        model = AutoModelForCausalLM.from_pretrained(
            options.model, revision=options.revision, dtype=options.dtype, device_map=options.device_map
        ).eval()
        target = {**describe_target(model, tokenizer, options.revision), "dtype": str(model.dtype)}
        if options.device_map is None:
            model.to("cuda" if torch.cuda.is_available() else "cpu")
        enable(model, drafter=options.drafter, adaptive=options.adaptive, pack_for_cpu=options.pack_for_cpu)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"The model {options.model} cannot be used: {error}") from error
    arguments = options.arguments_of_template
    return TargetWriter(model, tokenizer, arguments, options.sampling, options.max_prompt_tokens), target


def _settings(options: GenerateArguments, target: dict[str, Any]) -> dict[str, Any]:
    """What the rows depend on."""
    names = ("dataset", "split", "subset", "dataset_revision", "exclude", "system", "max_prompt_tokens", "drop_cut", "seed")
    return {
        "target": target,
        "template_arguments": options.arguments_of_template,
        "sampling": asdict(options.sampling),
        "shards": options.process[1],
        **{name: getattr(options, name) for name in names},
        "through_endpoint": options.endpoint is not None,
    }


def _batches(questions: Iterable[Question], size: int) -> Iterator[list[Question]]:
    source = iter(questions)
    while batch := list(islice(source, size)):
        yield batch


class _Progress:
    """Shows how fast questions are answered and how long it will take.

    Args:
        questions: What is to be answered.
        output: Where the answers go.
    """

    def __init__(self, questions: Iterable[Question], output: OutputFolder):
        from tqdm import tqdm

        total = len(questions) if isinstance(questions, Sized) else None
        self.questions = questions
        self.output = output
        self.before = output.counts["tokens"]
        self.start = time.monotonic()
        # What was there before says nothing about the speed.
        self.bar = tqdm(total=total, initial=len(output.done), desc="questions", file=sys.stderr, smoothing=0)

    def show(self) -> None:
        """Shows what was answered so far."""
        speed = (self.output.counts["tokens"] - self.before) / (time.monotonic() - self.start)
        failed = sum(number for name, number in self.output.counts.items() if name.startswith("failed"))
        self.bar.set_postfix({"tokens/s": f"{speed:.0f}", "failed": failed}, refresh=False)
        self.bar.update(len(self.output.done) - self.bar.n)

    def close(self) -> None:
        """Ends the line, so that what is said next begins one of its own."""
        self.bar.close()


def _keys(datasets: Iterable[str]) -> Iterator[str]:
    for source in datasets:
        for number, row in enumerate(load_rows(source), start=1):
            yield question_of(row, f"{source}, row {number}").key
