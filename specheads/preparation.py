"""From what `generate` prepared to a call that the loop can run; refuses by name what it cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList

from . import compat
from .config import SpeculativeConfig
from .drafters import DraftContext, Drafter
from .loop import Call
from .pacing import Pacer, PassCost
from .packing import is_packed
from .processors import ScoreProcessors, is_stateless
from .randomness import noise_for
from .sequences import Sequences
from .stats import SpeculationStats
from .target import ModelRunner, family_of, position_limit

KNOWN_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "encoder_outputs", compat.CACHE}
UNSUPPORTED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def prepare(
    model: PreTrainedModel,
    config: SpeculativeConfig,
    drafter: Drafter,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    streamer: Any,
    inputs_tensor: Tensor | None,
    model_kwargs: dict[str, Any],
) -> Call:
    """Runs the prompt and sets up a call.

    Args:
        model: The target.
        config: The call's settings.
        drafter: The call's own copy of the drafter.
        input_ids: `[B, P]` prompt, or the decoder's start.
        logits_processor: As prepared by `generate`.
        stopping_criteria: As prepared by `generate`.
        generation_config: As prepared by `generate`.
        streamer: The streamer, or `None`.
        inputs_tensor: What the encoder read, before rows were repeated for `num_return_sequences`.
        model_kwargs: What else the model's passes need.

    Raises:
        ValueError: if an argument is not supported or contradicts another.
    """
    _check_inputs(model_kwargs)
    mask = None if model.config.is_encoder_decoder else _left_padding(model_kwargs.get("attention_mask"))
    batch_size = input_ids.shape[0]
    noise = noise_for(config, batch_size) if generation_config.do_sample else None
    if model_kwargs.get(compat.CACHE) is None:
        model_kwargs[compat.CACHE] = compat.new_cache(model)
        model_kwargs["use_cache"] = True
    outputs = compat.prefill(model, input_ids, generation_config, model_kwargs)
    logits = outputs.logits[:, -1:].clone()
    ids = input_ids.to(logits.device, torch.long)
    limits = [generation_config.max_length, *(c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria)]
    # A limit within the prompt ends a row with its first token, as it does in plain decoding.
    max_length = max(min(limits), ids.shape[1] + 1)
    sequences = Sequences(ids, stopping_criteria, max_length, compat.pad_token(generation_config), streamer)
    processors = ScoreProcessors(logits_processor, sequences)
    verification = _verification(config, processors, noise is not None)
    family = family_of(model)
    room = sequences.max_length - sequences.prompt_width + max(config.draft_tokens, config.tree_nodes or 0) + 1
    encoder_ids, encoder_mask = _encoder_inputs(model, inputs_tensor, batch_size, model_kwargs)
    context = DraftContext(
        rows=list(range(batch_size)),
        sequences=sequences,
        prompts=_unpadded(input_ids, mask),
        encoder_ids=encoder_ids,
        encoder_mask=encoder_mask,
        processors=processors,
        noise=noise,
        config=config,
        vocab_size=logits.shape[-1],
        device=logits.device,
        takes_trees=family.takes_trees,
        position_limit=position_limit(model),
        weighs_proposals=noise is not None and verification != "match",
    )
    inputs = {name: model_kwargs[name] for name in ("encoder_outputs", "attention_mask") if model_kwargs.get(name) is not None}
    return Call(
        target=ModelRunner(model, compat.cache_of(outputs), mask, room, inputs if model.config.is_encoder_decoder else {}),
        logits=logits,
        drafter=drafter,
        context=context,
        pacer=Pacer(
            config,
            PassCost(logits.device, is_packed(model)),
            drafter.step_cost,
            drafter.weighs_nodes,
            uses_clock=noise is None or config.sampling_noise == "keyed",
            most=min(config.draft_tokens, max(0, sequences.max_length - sequences.prompt_width - 1)),
        ),
        verification=verification,
        in_step=not family.takes_trees or sequences.has_unknown_criteria or processors.is_sequential,
        stats=SpeculationStats.for_batch(batch_size, config.per_step),
    )


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


def _verification(config: SpeculativeConfig, processors: ScoreProcessors, samples: bool) -> str:
    """The mode of verification, `"match"` where a processor or the noise leaves no other."""
    if config.sampling_noise == "keyed":
        return "match"
    if not processors.is_sequential:
        return config.verification
    if samples and config.verification not in ("auto", "match"):
        names = [type(processor).__name__ for processor in processors.processors if not is_stateless(processor)]
        raise ValueError(
            f"{', '.join(names)} may keep a state between steps, so it can be called along the committed text only, which "
            f'verification="match" does; {config.verification!r} would call it on drafts.'
        )
    return "match"


def _encoder_inputs(
    model: PreTrainedModel, inputs_tensor: Tensor | None, batch_size: int, model_kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """The encoder's token ids and mask, one line per row, where the encoder read tokens."""
    if not model.config.is_encoder_decoder or inputs_tensor is None or inputs_tensor.is_floating_point():
        return None, None
    if bool((inputs_tensor < 0).any()):  # what stands in for ids where the encoder's outputs were given
        return None, None
    return inputs_tensor.repeat_interleave(batch_size // inputs_tensor.shape[0], dim=0), model_kwargs.get("attention_mask")


def _unpadded(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Each row's tokens without padding."""
    if mask is None:
        return ids.tolist()
    return [row[kept.bool().to(row.device)].tolist() for row, kept in zip(ids, mask, strict=True)]
