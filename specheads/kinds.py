"""Kinds of models: what wraps one, and what makes a token's scores depend on the tokens beside it in a pass."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .families import family_of

# Where wrappers keep what they wrap, by the package of their class: `torch.compile(model)`; PEFT's models and their tuners.
WRAPPERS = {"torch": ("_orig_mod",), "peft": ("base_model", "model")}


def unwrapped(model: Any) -> Any:
    """The transformers model inside what `torch.compile` and PEFT wrap around one; anything else as it is."""
    inner = model
    while isinstance(inner, nn.Module) and not isinstance(inner, PreTrainedModel):
        names = WRAPPERS.get(type(inner).__module__.split(".")[0], ())
        inner = next((inner._modules[name] for name in names if name in inner._modules), None)
    return inner if isinstance(inner, PreTrainedModel) else model


def check_model(model: PreTrainedModel) -> None:
    """Refuses a model whose speculative passes would not compute what its plain ones do.

    Raises:
        ValueError: saying why.
    """
    family_of(model)
    own = model.__dict__.get("prepare_inputs_for_generation")
    if own is not None and getattr(own, "__func__", own) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            "This model's `prepare_inputs_for_generation` was replaced, as PEFT does for learned prompts, and speculative "
            "passes do not go through it; call `generate` without `speculative`."
        )
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if getattr(getattr(hook, "func", hook), "__module__", "").startswith("peft."):
                raise ValueError(
                    "PEFT adapts each row or token of this call in its own way (`adapter_names`, activated LoRA), which it "
                    "counts by plain passes; call `generate` without `speculative`."
                )
        _check_activations(module)


def _check_activations(module: nn.Module) -> None:
    state = getattr(module, "state", None) if type(module).__name__ == "Linear8bitLt" else None
    if state is not None and state.threshold > 0:
        raise ValueError(
            "bitsandbytes looks for outliers over the whole pass, so that drafts would change the scores of other tokens; "
            "load the model with `llm_int8_threshold=0.0`, in four bits, or call `generate` without `speculative`."
        )
    activations = getattr(module._parameters.get("weight"), "act_quant_kwargs", None)
    if type(getattr(activations, "granularity", None)).__name__ == "PerTensor":
        raise ValueError(
            "This model quantises its activations by one scale for the whole pass, so that drafts would change the scores of "
            "other tokens; quantise them by row, or call `generate` without `speculative`."
        )
