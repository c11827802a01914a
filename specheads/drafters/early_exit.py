"""The target's own first layers as the drafter, without training.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) and LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).

The drafter is the target with fewer layers: a shallow copy that shares the modules of the first ones, the embeddings, the final
norm and the output layer. It shares their keys and values too. What it reads is what the target has committed; what it writes
goes behind that, into the slots that the target's next pass fills anew, for all layers, from the row's last token on. So there
is nothing to feed again, nothing to keep and nothing to roll back.

Shapes: B lines, V vocabulary, T tokens of a text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PreTrainedModel

from .. import compat
from ..cache import SlotCache
from ..families import family_of
from ..heads.target_parts import LAYERS, first_of
from ..target import SlotRunner
from .base import Accepted, Budget, DraftContext
from .draft_model import DraftModelDrafter, draft_processors
from .head import weights_per_pass

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # of the layers, tried where none are named
TEXT_LENGTH = 48  # tokens that the target says to be measured on
SEED = 0
MOST_DRAFTED = 8  # tokens of the chain that a choice of layers is judged by

Module = TypeVar("Module", bound=nn.Module)


class EarlyExitDrafter(DraftModelDrafter):
    """Drafts with the target's first layers.

    Args:
        target: The model.
        layers: How many of its layers; `None` measures which number promises most.
        prompt: `[1, T]` ids that the target is measured on, as it goes on from them; `None` for its first token of a text.

    Raises:
        ValueError: if the model's layers do not allow it, or there are not as many.
    """

    def __init__(self, target: PreTrainedModel, layers: int | None = None, prompt: Tensor | None = None):
        self.family = family_of(target)
        self.needs_step = not self.family.takes_trees
        most = len(_found(target)[1])
        if layers is not None and not 0 < layers < most:
            raise ValueError(f"`early-exit` takes from 1 to {most - 1} of the {most} layers of this model, got {layers}.")
        self.layers = chosen_layers(target, prompt) if layers is None else layers
        self.model = with_first_layers(target, self.layers)
        self.step_cost = weights_per_pass(self.model) / weights_per_pass(target)
        self.runner = None

    def begin(self, context: DraftContext) -> None:
        """Makes what changes during the call: the target's runner is shared as it is."""
        self.processors = draft_processors(context)

    def start(self, context: DraftContext) -> Tensor:
        """Runs on the rows' last tokens, the only ones that the shared keys and values do not hold."""
        assert isinstance(context.target, SlotRunner)
        self.runner = sharing(context.target, self.model, self.layers)
        self.pending = 1
        last = [context.sequences.continuations[row][-1] for row in context.rows]
        return self.follow(torch.tensor(last, device=context.device), 0)

    def depth_within_limit(self, context: DraftContext, budget: Budget) -> int:
        """The target's positions bound its own drafts already."""
        return budget.depth

    def commit(self, context: DraftContext, accepted: Accepted) -> None:
        """Nothing to keep: the target's pass has written all that was accepted."""
        self.runner = None

    def keep_rows(self, lines: Sequence[int]) -> None:
        """Nothing to drop."""


def early_exit_drafter(target: PreTrainedModel, argument: str, prompt: Tensor | None = None) -> EarlyExitDrafter:
    """The drafter by its name, `early-exit` or `early-exit:N`.

    Args:
        target: The model to draft for.
        argument: N as it was written; empty to measure.
        prompt: See `EarlyExitDrafter`.

    Raises:
        ValueError: if N is no number of layers.
    """
    if argument and not argument.isdecimal():
        raise ValueError(f"`early-exit:N` takes a number of layers, got {argument!r}.")
    return EarlyExitDrafter(target, int(argument) if argument else None, prompt)


def sharing(target: SlotRunner, model: PreTrainedModel, layers: int) -> SlotRunner:
    """A runner of the target's first layers for one draft, on the target's keys and values.

    Args:
        target: The target's runner, between two rounds.
        model: The model with the first layers.
        layers: How many these are.
    """
    runner = copy.copy(target)
    runner.model = model
    runner.slots = SlotCache(target.slots.layers[:layers], target.slots.layout)
    runner.fills = False
    runner.written = 0
    runner.forward = copy.copy(target.forward)
    runner.forward.model = model
    cache: Any = runner.slots
    always = {name: value for name, value in target.forward.always.items() if not name.startswith("output_")}
    for name, value in always.items():
        if isinstance(value, EncoderDecoderCache):
            always[name] = EncoderDecoderCache(cache, value.cross_attention_cache)
        elif isinstance(value, SlotCache):
            always[name] = cache
    runner.forward.always = always
    return runner


def with_first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The model with its first layers only. All modules are shared but those that hold the list of layers.

    Raises:
        ValueError: if its layers do not allow it.
    """
    name, every = _found(model)
    shallow = _copied(model)
    holder: nn.Module = shallow
    *path, last = name.split(".")
    for part in path:
        holder._modules[part] = _copied(holder._modules[part])  # type: ignore[type-var]
        holder = holder._modules[part]  # type: ignore[assignment]
    holder._modules[last] = nn.ModuleList(list(every)[:layers])
    return shallow


def chosen_layers(target: PreTrainedModel, prompt: Tensor | None = None) -> int:
    """The number of layers that promises most: measured by how far their laws agree with the target's on a text of its own.

    Args:
        target: The model.
        prompt: `[1, T]` what the text begins with; `None` for the first token of a text.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            "How many layers draft best cannot be measured on an encoder-decoder without an input; name the number, "
            "`early-exit:N`."
        )
    most = len(_found(target)[1])
    numbers = sorted({max(1, min(most - 1, round(share * most))) for share in SHARES})
    text = own_text(target, prompt)
    wanted = _laws(target, text)
    promises = {}
    for number in numbers:
        shallow = with_first_layers(target, number)
        agreement = float(torch.minimum(wanted, _laws(shallow, text)).sum(dim=-1).mean())
        promises[number] = promised_speed(agreement, weights_per_pass(shallow) / weights_per_pass(target))
    return max(promises, key=lambda number: promises[number])


def promised_speed(agreement: float, step_cost: float) -> float:
    """Tokens per plain pass at the best length of a chain (Leviathan et al. 2023).

    Args:
        agreement: How often a drafted token is accepted.
        step_cost: What drafting one costs, in passes of the target.
    """
    emitted, best = 1.0, 0.0
    for length in range(1, MOST_DRAFTED + 1):
        emitted += agreement**length
        best = max(best, emitted / (1 + length * step_cost))
    return best


@torch.no_grad()
def own_text(target: PreTrainedModel, prompt: Tensor | None) -> Tensor:
    """`[1, T]` what the target says by itself, sampled without touching anyone's random numbers."""
    first = first_of(target.generation_config, ("bos_token_id", "decoder_start_token_id", "eos_token_id"), 0)
    ids = torch.tensor([[first if isinstance(first, int) else first[0]]]) if prompt is None else prompt
    ids = ids.to(target.device)
    generator = torch.Generator(ids.device).manual_seed(SEED)
    cache: Any = None
    given = ids
    for _ in range(TEXT_LENGTH):
        outputs = target(input_ids=given, use_cache=True, **({} if cache is None else {compat.cache_name(target): cache}))
        cache = compat.cache_of(target, outputs)
        given = torch.multinomial(outputs.logits[:, -1].float().softmax(dim=-1), 1, generator=generator)
        ids = torch.cat([ids, given], dim=1)
    return ids


@torch.no_grad()
def _laws(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`[T, V]` of the text's last tokens."""
    return model(input_ids=ids, use_cache=False).logits[0, -TEXT_LENGTH:].float().softmax(dim=-1)


def _copied(module: Module) -> Module:
    """The module with its own table of submodules, which are shared."""
    if "forward" in vars(module):
        raise ValueError(
            f"The model's {type(module).__name__} has a `forward` of its own, as models on several devices and compiled ones "
            "do, and a part of it cannot be run alone; `early-exit` is refused."
        )
    shallow = copy.copy(module)
    shallow._modules = dict(module._modules)
    return shallow


def _found(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the list of the decoder's layers.

    Raises:
        ValueError: if there is no one list of them, or their keys and values cannot be shared.
    """
    family, config = family_of(model), model.config.get_text_config(decoder=True)
    name = model.config.model_type
    if family.is_stateful:
        raise ValueError(f"{name!r} models have layers with a state that a draft would change, so `early-exit` is refused.")
    count = first_of(config, LAYERS)
    decoder = model.get_decoder()
    root = next((path for path, module in model.named_modules() if module is decoder), "")
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and path.startswith(root)
    ]
    outermost = [each for each in lists if not any(each[0].startswith(f"{other[0]}.") for other in lists)]
    if len(outermost) != 1 or count < 2:
        raise ValueError(
            f"`early-exit` needs a model with a list of at least 2 decoder layers, and of {name!r} it finds "
            f"{len(outermost)} lists of {count}; use another drafter."
        )
    return outermost[0]
