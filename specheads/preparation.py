"""From what `generate` prepared to a call that the loop can run; refuses by name what it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList

from . import compat
from .config import SpeculativeConfig
from .drafters import DraftContext, Drafter
from .loop import Call
from .pacing import Pacer, PassCost
from .packing import is_packed
from .processors import ScoreProcessors, is_stateless
from .randomness import Noise, noise_for
from .sequences import Sequences
from .stats import SpeculationStats
from .target import ModelRunner, family_of, position_limit

KNOWN_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "encoder_outputs", compat.CACHE}
UNSUPPORTED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


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
    _check_inputs(request.model_kwargs)
    mask = None if model.config.is_encoder_decoder else _left_padding(request.model_kwargs.get("attention_mask"))
    noise = noise_for(config, len(request.input_ids)) if request.generation_config.do_sample else None
    verification = _verification(config, request.logits_processor, noise is not None)
    logits, cache = _run_prompt(model, request)
    sequences = _sequences(request, logits.device)
    weighs = noise is not None and verification != "match"
    context = _context(model, config, request, sequences, noise, mask, logits, weighs)
    most = min(config.draft_tokens, sequences.remaining(0) - 1)
    # A clock would make it a matter of chance which random numbers are drawn.
    uses_clock = noise is None or config.sampling_noise == "keyed"
    cost = PassCost(logits.device, is_packed(model))
    return Call(
        target=_runner(model, config, request, cache, mask, sequences.remaining(0)),
        logits=logits,
        drafter=drafter,
        context=context,
        pacer=Pacer(config, cost, drafter.step_cost, drafter.weighs_nodes, uses_clock, most),
        verification=verification,
        in_step=not context.takes_trees or sequences.has_unknown_criteria or context.processors.is_sequential,
        stats=SpeculationStats.for_batch(sequences.batch_size, config.per_step),
    )


def _run_prompt(model: PreTrainedModel, request: Request) -> tuple[Tensor, Cache]:
    """The stock pass over the prompt: the logits `[B, 1, V]` of the first token, and the cache."""
    if request.model_kwargs.get(compat.CACHE) is None:
        request.model_kwargs[compat.CACHE] = compat.new_cache(model)
        request.model_kwargs["use_cache"] = True
    outputs = compat.prefill(model, request.input_ids, request.generation_config, request.model_kwargs)
    # A copy, so that the logits of the whole prompt do not stay.
    return outputs.logits[:, -1:].clone(), compat.cache_of(outputs)


def _sequences(request: Request, device: torch.device) -> Sequences:
    ids, config, criteria = request.input_ids.to(device, torch.long), request.generation_config, request.stopping_criteria
    limits = [config.max_length, *(rule.max_length for rule in criteria if type(rule) is MaxLengthCriteria)]
    # A limit within the prompt ends a row with its first token, as it does in plain decoding.
    return Sequences(ids, criteria, max(min(limits), ids.shape[1] + 1), compat.pad_token(config), request.streamer)


def _context(
    model: PreTrainedModel,
    config: SpeculativeConfig,
    request: Request,
    sequences: Sequences,
    noise: Noise | None,
    mask: Tensor | None,
    logits: Tensor,
    weighs_proposals: bool,
) -> DraftContext:
    encoder_ids, encoder_mask = _encoder_inputs(model, request)
    return DraftContext(
        rows=list(range(sequences.batch_size)),
        sequences=sequences,
        prompts=_unpadded(request.input_ids, mask),
        encoder_ids=encoder_ids,
        encoder_mask=encoder_mask,
        processors=ScoreProcessors(request.logits_processor, sequences),
        noise=noise,
        config=config,
        vocab_size=logits.shape[-1],
        device=logits.device,
        takes_trees=family_of(model).takes_trees,
        position_limit=position_limit(model),
        weighs_proposals=weighs_proposals,
    )


def _runner(
    model: PreTrainedModel, config: SpeculativeConfig, request: Request, cache: Cache, mask: Tensor | None, tokens: int
) -> ModelRunner:
    room = tokens + max(config.draft_tokens, config.tree_nodes or 0) + 1
    names = ("encoder_outputs", "attention_mask") if model.config.is_encoder_decoder else ()
    given = request.model_kwargs
    return ModelRunner(model, cache, mask, room, {name: given[name] for name in names if given.get(name) is not None})


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
    wanted = [name for name in UNSUPPORTED_OUTPUTS if getattr(generation_config, name, None)]
    if generation_config.return_dict_in_generate and wanted:
        raise ValueError(f"`speculative` does not support {', '.join(wanted)} yet; drop them or `speculative`.")


def _check_inputs(model_kwargs: dict[str, Any]) -> None:
    unknown = [name for name, value in model_kwargs.items() if name not in KNOWN_INPUTS and value is not None]
    if unknown:
        raise ValueError(
            f"`speculative` does not support the argument(s) {', '.join(unknown)} yet; drop them or `speculative`."
        )
    cache = model_kwargs.get(compat.CACHE)
    if cache is not None and (getattr(cache, "_is_user_defined", False) or not compat.is_plain_cache(cache)):
        raise ValueError(
            f"`speculative` keeps a cache of its own and does not take `{compat.CACHE}` yet; drop it, or `speculative`."
        )
    _check_positions(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"))


def _left_padding(mask: Tensor | None) -> Tensor | None:
    """The prompt's mask in whole numbers.

    Raises:
        ValueError: if it does anything but hide the beginnings of rows.
    """
    if mask is None:
        return None
    whole = mask.long()
    if (
        bool((whole != mask).any())
        or bool((whole[:, -1] != 1).any())
        or bool((whole.diff(dim=1) < 0).any())
        or bool((whole < 0).any())
    ):
        raise ValueError(
            "`speculative` needs an `attention_mask` of zeros for the padding at the left of a row and ones for its tokens; "
            "set `padding_side='left'` on the tokenizer."
        )
    return whole


def _check_positions(position_ids: Tensor | None, mask: Tensor | None) -> None:
    """Positions must count each row's tokens, since that is where drafts are placed."""
    if position_ids is None:
        return
    if mask is None:
        usual = torch.arange(position_ids.shape[-1], device=position_ids.device).expand_as(position_ids)
        holds = bool((position_ids == usual).all())
    else:
        holds = bool((position_ids == mask.long().cumsum(dim=-1) - 1)[mask.bool()].all())
    if not holds:
        raise ValueError("`speculative` needs positions that count a row's tokens; drop `position_ids`, which say otherwise.")


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


def _encoder_inputs(model: PreTrainedModel, request: Request) -> tuple[Tensor | None, Tensor | None]:
    """The encoder's token ids and mask, one line per row, where the encoder read tokens."""
    ids = request.inputs_tensor
    # Negative ids stand in where the encoder's outputs were given.
    if not model.config.is_encoder_decoder or ids is None or ids.is_floating_point() or bool((ids < 0).any()):
        return None, None
    repeats = len(request.input_ids) // len(ids)
    return ids.repeat_interleave(repeats, dim=0), request.model_kwargs.get("attention_mask")


def _unpadded(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Each row's tokens without padding."""
    if mask is None:
        return ids.tolist()
    return [row[kept.bool().to(row.device)].tolist() for row, kept in zip(ids, mask, strict=True)]
