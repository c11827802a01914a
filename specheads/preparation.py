"""From what `generate` prepared to a call that the loop can run; refuses by name what it cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList

from . import compat
from .config import SpeculativeConfig
from .drafters import DraftContext, Drafter
from .families import Family, family_of, known_position_limit, position_limit
from .features import PromptFeatures, collected, joined
from .few_rows import LEAST_TOKENS, fills_passes
from .loop import Call
from .outputs import StepOutputs
from .pacing import Pacer, PassCost
from .packing import is_packed
from .processors import ScoreProcessors, is_stateless
from .randomness import Noise, noise_for
from .sequences import Sequences
from .stats import SpeculationStats
from .target import ModelRunner, Pass, Prompt, make_runner

# What later passes need, or do without, of what `generate` hands to the model.
KNOWN_INPUTS = {
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "decoder_attention_mask",
    "decoder_position_ids",
    "encoder_outputs",
    "inputs_embeds",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "use_cache",
    *compat.CACHE_NAMES,
}
# What the pass over the prompt takes, and those after it do without.
PROMPT_INPUTS = compat.PROMPT_INPUTS.union({"image_grid_thw", "video_grid_thw", "second_per_grid_ts"})
ENCODER_INPUTS = ("encoder_outputs", "attention_mask")
OUTPUT_SWITCHES = ("output_attentions", "output_hidden_states")
# Settings of transformers' own assisted generation, and a decoding loop of one's own.
OF_OTHER_MODES = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "max_matching_ngram_size",
    "assistant_ensemble_weight",
    "custom_generate",
)
# Tokens that stand for what is no text, by the names that configurations give them.
PLACEHOLDERS = tuple(f"{kind}_token_{name}" for kind in ("image", "video", "audio") for name in ("id", "index"))


@dataclass
class Request:
    """What `generate` prepared for its decoding loop.

    Args:
        input_ids: `[B, P]` prompt, or the decoder's start.
        logits_processor: The logits processors.
        stopping_criteria: The stopping criteria.
        generation_config: The settings.
        streamer: The streamer, or `None`.
        inputs_tensor: What the encoder read, before rows were repeated for `num_return_sequences`.
        model_kwargs: What else the model's passes need.
    """

    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: Any
    streamer: Any
    inputs_tensor: Tensor | None
    model_kwargs: dict[str, Any]


def prepare(model: PreTrainedModel, config: SpeculativeConfig, drafter: Drafter, request: Request) -> Call:
    """Runs the prompt and sets up a call.

    Args:
        model: The target.
        config: The call's settings.
        drafter: The call's own copy of the drafter.
        request: What `generate` prepared.

    Raises:
        ValueError: if an argument is not supported or contradicts another.
    """
    check_inputs(request.model_kwargs)
    check_prompt_length(model, request)
    noise = noise_for(config, len(request.input_ids)) if request.generation_config.do_sample else None
    verification = _verification(config, request.logits_processor, noise is not None)
    layers = getattr(drafter, "feature_layers", ())
    given, features, cache = _run_prompt(model, request, layers)
    prompt = _prompt(model, request, cache, given)
    sequences = _sequences(request, given.logits.device)
    weighs = noise is not None and verification != "match"
    context = _context(model, config, request, prompt, sequences, noise, given.logits, weighs)
    context.prompt_features = PromptFeatures.of(sequences.ids[:, : sequences.prompt_width], features, prompt.hidden)
    most = min(config.draft_tokens, sequences.remaining(0) - 1)
    # A clock would make it a matter of chance which random numbers are drawn.
    uses_clock = noise is None or config.sampling_noise == "keyed"
    target = _runner(model, config, request, cache, prompt, sequences.remaining(0))
    context.target = target
    cost = PassCost(given.logits.device, is_packed(model), target.fills)
    return Call(
        target=target,
        prompt=given.last(),
        drafter=drafter,
        context=context,
        pacer=Pacer(config, cost, drafter.step_cost, drafter.weighs_nodes, uses_clock, most, len(context.rows)),
        verification=verification,
        in_step=_goes_in_step(context, drafter, family_of(model)),
        stats=SpeculationStats.for_batch(sequences.batch_size, config.per_step, config.per_step_drafts),
        outputs=StepOutputs(request.generation_config, sequences.batch_size, given),
        show=getattr(request.streamer, "put_round", None),
    )


def _goes_in_step(context: DraftContext, drafter: Drafter, family: Family) -> bool:
    if not family.takes_trees or context.processors.is_sequential or context.sequences.needs_step:
        return True
    return getattr(drafter, "needs_step", False)


def _run_prompt(model: PreTrainedModel, request: Request, layers: Sequence[int]) -> tuple[Pass, Tensor | None, Cache]:
    """The stock pass over the prompt.

    Args:
        model: The target.
        request: What `generate` prepared; asks for the features from here on.
        layers: The drafter's feature layers.

    Returns:
        What the pass gave, of the logits `[B, 1, V]` those of the first token; the features `[B, C, L H]` of the columns that
        it ran on, or `None`; and the cache.
    """
    if request.model_kwargs.get(name := compat.cache_name(model)) is None:
        request.model_kwargs[name] = compat.new_cache(model)
        request.model_kwargs["use_cache"] = True
    wanted = compat.hidden_states_request(layers, request.model_kwargs.get("output_hidden_states"))
    if layers:
        request.model_kwargs["output_hidden_states"] = wanted
    with collected(model, layers) as chunks:
        outputs = compat.prefill(model, request.input_ids, request.generation_config, request.model_kwargs)
    given = Pass.of(outputs)
    # A copy, so that the logits of the whole prompt do not stay.
    logits = given.logits[:, -1:].to(request.input_ids.device, copy=True)
    return replace(given, logits=logits), joined(chunks), compat.cache_of(model, outputs)


def _prompt(model: PreTrainedModel, request: Request, cache: Cache, given: Pass) -> Prompt:
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    mask = request.model_kwargs.get(f"{prefix}attention_mask")
    following = compat.next_position(model, request.input_ids, cache, request.model_kwargs, f"{prefix}position_ids")
    columns = compat.columns(cache, request.input_ids)
    return Prompt.of(columns, len(request.input_ids), mask, following, given.logits.device)


def _sequences(request: Request, device: torch.device) -> Sequences:
    ids, config, criteria = request.input_ids.to(device, torch.long), request.generation_config, request.stopping_criteria
    limits = [config.max_length, *(rule.max_length for rule in criteria if type(rule) is MaxLengthCriteria)]
    # A limit within the prompt ends a row with its first token, as it does in plain decoding.
    return Sequences(ids, criteria, max(min(limits), ids.shape[1] + 1), compat.pad_token(config), request.streamer)


def _context(
    model: PreTrainedModel,
    config: SpeculativeConfig,
    request: Request,
    prompt: Prompt,
    sequences: Sequences,
    noise: Noise | None,
    logits: Tensor,
    weighs_proposals: bool,
) -> DraftContext:
    encoder_inputs = _encoder_inputs(model, request)
    reads_ids = encoder_inputs is not None and not encoder_inputs.is_floating_point()
    processors = ScoreProcessors(request.logits_processor, sequences)
    limit, following = position_limit(model), prompt.next_position.flatten().tolist()
    takes_trees = family_of(model).takes_trees
    if not takes_trees:  # rows go in step, and with one all have the same columns: padding takes positions too
        following = [max(first, prompt.columns) for first in following]
    return DraftContext(
        rows=list(range(sequences.batch_size)),
        sequences=sequences,
        prompts=_readable(request.input_ids, prompt.hidden, _placeholders(model), logits.shape[-1]),
        encoder_ids=encoder_inputs if reads_ids else None,
        encoder_mask=None if encoder_inputs is None else request.model_kwargs.get("attention_mask"),
        processors=processors,
        noise=noise,
        config=config,
        vocab_size=logits.shape[-1],
        device=logits.device,
        takes_trees=takes_trees,
        positions_left=None if limit is None else [limit - first for first in following],
        positions=known_position_limit(model),
        weighs_proposals=weighs_proposals,
        encoder_inputs=encoder_inputs,
    )


def _runner(
    model: PreTrainedModel, config: SpeculativeConfig, request: Request, cache: Cache, prompt: Prompt, tokens: int
) -> ModelRunner:
    room = tokens + max(config.draft_tokens, config.tree_nodes or 0) + LEAST_TOKENS
    names = (*OUTPUT_SWITCHES, *(ENCODER_INPUTS if model.config.is_encoder_decoder else ()))
    given = request.model_kwargs
    inputs = {name: given[name] for name in names if given.get(name) is not None}
    family = family_of(model)
    runner = make_runner(model, cache, prompt, family, room, inputs)
    runner.fills = family.takes_trees and fills_passes(model)
    return runner


def check_mode(mode: Any, generation_config: Any, synced_gpus: bool | None) -> None:
    """Refuses, before anything is computed, what the settings of `generate` ask for and the loop does not do.

    Args:
        mode: The generation mode that `generate` settled on.
        generation_config: Its settings.
        synced_gpus: Whether ranks must make the same passes.

    Raises:
        ValueError: naming the setting.
    """
    if mode not in compat.SAMPLE_MODES:
        name = str(mode.value).replace("_", " ")
        raise ValueError(
            f"`speculative` works for greedy decoding and sampling, but these arguments ask for {name}; "
            "drop them or call `generate` without `speculative`."
        )
    if synced_gpus:
        raise ValueError(
            "`speculative` is not supported with `synced_gpus` (FSDP, ZeRO-3): ranks would draft different lengths."
        )
    if generation_config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"`speculative` keeps a cache of its own and does not take `cache_implementation="
            f"{generation_config.cache_implementation!r}`; drop it, or `speculative`."
        )


def check_settings(arguments: Mapping[str, Any]) -> None:
    """Refuses what belongs to other ways of decoding, by the arguments of `generate`.

    Raises:
        ValueError: naming the settings.
    """
    config = arguments.get("generation_config")
    settings = {**({} if config is None else vars(config)), **arguments}
    foreign = [name for name in OF_OTHER_MODES if settings.get(name) is not None]
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)}: not for speculative generation, which has settings of its own (`speculative={{...}}`); "
            "drop them or `speculative`."
        )


def check_inputs(model_kwargs: Mapping[str, Any]) -> None:
    """Refuses inputs that the loop cannot hand on.

    Args:
        model_kwargs: What the model is to get, by name.

    Raises:
        ValueError: naming the input.
    """
    known = KNOWN_INPUTS.union(PROMPT_INPUTS)
    unknown = [name for name, value in model_kwargs.items() if name not in known and value is not None]
    if unknown:
        raise ValueError(
            f"`speculative` does not support the argument(s) {', '.join(unknown)} yet; drop them or `speculative`."
        )
    for name in compat.CACHE_NAMES:
        check_cache(model_kwargs.get(name))


def check_prompt_length(model: PreTrainedModel, request: Request) -> None:
    """Refuses a prompt that the model has no positions for, on which its pass would break off.

    Raises:
        ValueError: saying how long the prompt is and how many positions there are.
    """
    limit = known_position_limit(model)
    if limit is None:
        return
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    given = request.model_kwargs.get(f"{prefix}position_ids")
    if given is not None and given.numel():
        length = int(given.max()) + 1
    else:
        cache = request.model_kwargs.get(compat.cache_name(model))
        length = max(request.input_ids.shape[1], 0 if cache is None else cache.get_seq_length())
    if length > limit:
        raise ValueError(
            f"The prompt takes {length} positions and the model has {limit}; shorten it to {limit} tokens or fewer, and leave "
            "room for what is to be generated."
        )


def check_cache(cache: Any) -> None:
    """Refuses a cache that a round cannot be built on.

    Raises:
        ValueError: naming its class.
    """
    if cache is not None and not compat.is_plain_cache(cache):
        raise ValueError(
            f"`speculative` takes as `{compat.CACHE}` a `DynamicCache`, not offloaded (a pair of them for an encoder-decoder), "
            f"got {type(cache).__name__}; pass one, or drop it or `speculative`."
        )


def _verification(config: SpeculativeConfig, processors: LogitsProcessorList, samples: bool) -> str:
    """The mode of verification, `"match"` where a processor or the noise leaves no other."""
    if config.sampling_noise == "keyed":
        return "match"
    names = [type(processor).__name__ for processor in processors if not is_stateless(processor)]
    if not names:
        return config.verification
    if samples and config.verification not in ("auto", "match"):
        raise ValueError(
            f"{', '.join(names)} may keep a state between steps, so it can be called along the committed text only, which "
            f'verification="match" does; {config.verification!r} would call it on drafts.'
        )
    return "match"


def _encoder_inputs(model: PreTrainedModel, request: Request) -> Tensor | None:
    """What the encoder read, one line per row; `None` if that is not known."""
    given = request.inputs_tensor
    # Negative ids stand in where the encoder's outputs were given.
    if not model.config.is_encoder_decoder or given is None or (not given.is_floating_point() and bool((given < 0).any())):
        return None
    return given.repeat_interleave(len(request.input_ids) // len(given), dim=0)


def _placeholders(model: PreTrainedModel) -> set[int]:
    """The tokens that stand for images and the like."""
    return {token for name in PLACEHOLDERS if isinstance(token := getattr(model.config, name, None), int)}


def _readable(ids: Tensor, hidden: Tensor | None, placeholders: set[int], vocab_size: int) -> list[list[int]]:
    """Each row's tokens without padding. A token of the size of the vocabulary, which none is, stands for what is no text."""
    rows = ids.tolist()
    if hidden is not None and ids.shape[1]:
        masks = hidden[:, -ids.shape[1] :].tolist()
        rows = [[token for token, out in zip(row, mask, strict=True) if not out] for row, mask in zip(rows, masks, strict=True)]
    rows = [[vocab_size if token in placeholders else token for token in row] for row in rows]
    readable = []
    for row in rows:
        runs = groupby(row, key=lambda token: token == vocab_size)
        readable.append([token for is_hole, run in runs for token in (list(run)[:1] if is_hole else run)] or [vocab_size])
    return readable
