"""Where `generate` hands over to the speculative loop."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from . import adapters, attention, compat, packing
from .closing import lent_cache, returned_fields
from .config import SpeculativeConfig
from .drafters import Drafter, head_of, load_drafter
from .drafters import check_settings as check_settings_of_drafter
from .kinds import check_model, unwrapped
from .loop import run
from .preparation import Request, check_cache, check_mode, check_settings, prepare
from .stats import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput

Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass
class Attachment:
    """What `enable` left on a model: the drafter, the settings that calls start from, and whether it gave it an adapter."""

    config: SpeculativeConfig
    drafter: Drafter | None
    is_adapted: bool = False


@dataclass
class Plan:
    """What one call of `generate` asked for. `model` is the one it was asked of: others may generate within the call."""

    model: Any
    config: SpeculativeConfig
    drafter: Drafter
    was_carried_out: bool = False


# A context variable, so that nested and threaded calls do not mix.
_PLAN: ContextVar[Plan | None] = ContextVar("specheads_plan", default=None)


class SpeculativeGenerationMixin(GenerationMixin):
    """Adds `speculative=` to `generate`.

    Stands before the model class: `class MyModel(SpeculativeGenerationMixin, LlamaForCausalLM)`.
    """

    def generate(
        self,
        *args: Any,
        speculative: bool | Mapping[str, Any] | SpeculativeConfig | None = None,
        assistant_model: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generates as `transformers` does, speculatively if asked to: the same law in fewer target passes.

        Args:
            *args: As for `GenerationMixin.generate`.
            speculative: `True`, a `SpeculativeConfig` or a dict of its fields to speculate; `False` for the model's own
                `generate`. `None` does what the generation config says: the call's or the model's may have an entry
                `speculative`, `True` or a dict, which is saved with it.
            assistant_model: A draft model for this call. One with another tokenizer needs `tokenizer=` and
                `assistant_tokenizer=` too.
            **kwargs: As for `GenerationMixin.generate`.

        Returns:
            What `GenerationMixin.generate` returns; with `return_dict_in_generate=True` the output has a field `speculation`,
            a `SpeculationStats`.

        Raises:
            ValueError: if the call cannot be exact or is not supported; the message says why.
        """
        if isinstance(kwargs.get("custom_generate"), str):
            return self._generate_by_recipe(*args, speculative=speculative, assistant_model=assistant_model, **kwargs)
        if speculative is None:
            speculative = self._configured_speculation(*args, **kwargs)
        if speculative is None or speculative is False:
            if assistant_model is not None:
                kwargs["assistant_model"] = assistant_model
            return self._generate_under(None, *args, **kwargs)
        for name in compat.CACHE_NAMES:
            check_cache(kwargs.get(name))
        plan = self._make_plan(speculative, assistant_model, kwargs)
        result = self._generate_under(plan, *args, **kwargs)
        if not plan.was_carried_out:
            raise ValueError("This call of `generate` does not use the decoding loop, so it cannot be speculative.")
        return result

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; the settings in `generation_config.speculative` are loaded again with it."""
        if getattr(self.generation_config, "speculative", None) is not None:
            # Of a config that was made from the model's, transformers forgets what it does not know.
            self.generation_config._from_model_config = False
        return super().save_pretrained(*args, **kwargs)

    def _generate_by_recipe(self, *args: Any, **kwargs: Any) -> Any:
        # The `custom_generate` of a repository takes the place of the whole `generate`, and all its arguments as they are.
        return self._generate_under(None, *args, **{name: value for name, value in kwargs.items() if value is not None})

    def _generate_under(self, plan: Plan | None, *args: Any, **kwargs: Any) -> Any:
        packing.refresh(self)
        token = _PLAN.set(plan)
        try:
            return super().generate(*args, **kwargs)
        finally:
            _PLAN.reset(token)

    def _configured_speculation(self, inputs: Any = None, generation_config: Any = None, *_: Any, **__: Any) -> Any:
        own = getattr(generation_config, "speculative", None)
        return getattr(self.generation_config, "speculative", None) if own is None else own

    def _make_plan(self, speculative: Any, assistant_model: Any, kwargs: dict[str, Any]) -> Plan:
        stray = [name for name in kwargs if name in SpeculativeConfig.__dataclass_fields__]
        if stray:
            raise ValueError(f"{', '.join(stray)}: settings of speculation go into `speculative={{...}}`, not beside it.")
        check_settings(kwargs)
        attached = self.__dict__.get("_speculation") or Attachment(SpeculativeConfig(), None)
        config = SpeculativeConfig.from_value(speculative, attached.config)
        check_model(self)
        assistant_model = unwrapped(assistant_model)
        assistant_tokenizer = kwargs.pop("assistant_tokenizer", None)
        if assistant_model is not None:
            if not isinstance(assistant_model, PreTrainedModel):
                raise TypeError(
                    f"`assistant_model` must be a model, got {type(assistant_model).__name__}; name a drafter with "
                    "`speculative={'drafter': ...}` or attach one with `specheads.enable`."
                )
            drafter = load_drafter(assistant_model, self, kwargs.get("tokenizer"), assistant_tokenizer)
        elif assistant_tokenizer is not None:
            raise ValueError("`assistant_tokenizer` belongs to an `assistant_model`, and this call has none.")
        elif attached.drafter is not None and config.drafter in (None, attached.config.drafter):
            drafter = attached.drafter
        else:
            drafter = load_drafter("auto" if config.drafter is None else config.drafter, self, kwargs.get("tokenizer"))
        check_settings_of_drafter(drafter, config)
        return Plan(self, config, copy.copy(drafter))

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any) -> None:
        plan = _PLAN.get()
        if plan is not None and plan.model is self:
            check_mode(generation_mode, generation_config, generation_mode_kwargs.get("synced_gpus"))
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        plan = _PLAN.get()
        if plan is None or plan.model is not self:
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        plan.was_carried_out = True
        start = time.perf_counter()
        request = Request(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer, inputs_tensor, model_kwargs
        )
        call = prepare(self, plan.config, plan.drafter, request)
        with lent_cache(call, request):
            ids = run(call).to(input_ids.device)
            fields = returned_fields(call, request)
        call.stats.close(time.perf_counter() - start)
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return ids
        output_class = SpeculativeEncoderDecoderOutput if self.config.is_encoder_decoder else SpeculativeDecoderOnlyOutput
        output = output_class(sequences=ids, **fields)
        output.speculation = call.stats
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class that `enable` made has no importable name: pickles name the model's own class and enable it again.
        original = _original_class(type(self))
        if original is None:
            return super().__reduce_ex__(protocol)
        return _restore, (original, self.__dict__)


def enable(
    model: Model,
    drafter: Any = None,
    *,
    pack_for_cpu: bool = False,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **options: Any,
) -> Model:
    """Lets a model generate speculatively, in place.

    Args:
        model: A model of a supported family.
        drafter: What drafts: a name (`"auto"`, `"suffix"`, `"recycling"`, `"lookup"`, `"lookahead"`, `"none"`, or to measure
            `"wrong"`; `"retrieval:FOLDER"` with the folder of a datastore; `"early-exit"` or `"early-exit:N"` for the model's
            own first layers; `"mtp"` for the multi-token-prediction layers of its checkpoint), a draft head or the folder or
            Hub id of one, a draft model, a list of draft models, whose draws make one tree of up to `tree_nodes` nodes, a dict
            of a `draft` model and the `inner` drafter that speeds it up (`"suffix"`), or a drafter.
        pack_for_cpu: Make passes of a few tokens cheap on a CPU (`specheads.pack_for_cpu`), and the layers of a head with them
            that is loaded here.
        tokenizer: The model's tokenizer; needed for a draft model with another one, or whose vocabulary is padded to another
            size.
        assistant_tokenizer: That draft model's tokenizer.
        **options: Fields of `SpeculativeConfig`, the defaults of this model's calls, before what a head's config says of
            them; and for a head from the Hub how it is downloaded: `revision`, `token`, `cache_dir`, `local_files_only`,
            `subfolder`, `force_download`.

    Returns:
        The same model. Calls speculate where they say `speculative=True`.

    Warns:
        UserWarning: if the head goes with an adapter of the model, which the model then has: what it generates changes.

    Raises:
        ValueError: if the family is not supported, the drafter does not fit it, an option is unknown or out of range or lacks,
            or `generate` is bound on the instance.
        TypeError: if `model` or `drafter` is of a wrong type.
    """
    given, model = model, _checked(model)
    download = _taken_download_options(options)
    options["drafter"] = drafter if isinstance(drafter, str) else None
    config = SpeculativeConfig.from_options(options)
    if drafter is None and download:
        raise ValueError(f"{', '.join(download)}: only a head that is loaded from the Hub takes such arguments; name it.")
    attachment = _attachment(model, drafter, tokenizer, assistant_tokenizer, config, options, download)
    attention.share_heads(model)
    if pack_for_cpu:
        packing.pack_for_cpu(model)
        head = head_of(attachment.drafter)
        if head is not None and isinstance(drafter, str | os.PathLike):  # one that was given is the caller's to pack
            packing.pack_like(head, model)
    if not isinstance(model, SpeculativeGenerationMixin):
        original: Any = type(model)
        model.__class__ = _speculative_class(original)
    model._speculation = attachment
    return given


def _attachment(
    model: Any,
    drafter: Any,
    tokenizer: Any,
    assistant_tokenizer: Any,
    config: SpeculativeConfig,
    options: dict[str, Any],
    download: dict[str, Any],
) -> Attachment:
    """Loads what `enable` is to attach."""
    _take_adapter_away(model)
    loaded = None if drafter is None else load_drafter(unwrapped(drafter), model, tokenizer, assistant_tokenizer, **download)
    if saved := getattr(loaded, "settings", None):
        config = SpeculativeConfig.from_options({**saved, **options})
    if loaded is not None and isinstance(drafter, list | tuple):
        check_settings_of_drafter(loaded, config)  # calls may name another number, but this one has to be there
    is_adapted = isinstance(drafter, str | os.PathLike) and adapters.goes_with(head_of(loaded))
    if is_adapted:
        adapters.load_adapter(model, drafter, **download)
    return Attachment(config, loaded, is_adapted)


def disable(model: Model) -> Model:
    """Undoes `enable`, packed weights and a head's adapter included.

    Args:
        model: The model; one that is not enabled stays as it is.

    Returns:
        The same model.
    """
    given, model = model, unwrapped(model)
    original = _original_class(type(model))
    if original is not None:
        model.__class__ = original
    _take_adapter_away(model)
    model.__dict__.pop("_speculation", None)
    packing.unpack(model)
    attention.repeat_heads(model)
    return given


def _checked(given: Any) -> Any:
    """The model that is to generate, without what wraps it.

    Raises:
        TypeError: if it is no model that can generate.
        ValueError: if its family is not supported, or `generate` is bound on the instance.
    """
    model = unwrapped(given)
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise TypeError(f"`enable` takes a transformers model that can generate, got {type(given).__name__}.")
    check_model(model)
    if "generate" in model.__dict__:
        raise ValueError(
            "This model carries its own `generate` (a `custom_generate` of its repository, or a patch), which would bypass "
            "speculation; load it without that, or delete `model.generate`."
        )
    return model


def _take_adapter_away(model: Any) -> None:
    """Undoes what `enable` did for a head that goes with an adapter of the model."""
    attachment = model.__dict__.get("_speculation")
    if attachment is not None and attachment.is_adapted:
        adapters.remove_adapter(model)
        attachment.is_adapted = False  # what follows may fail


def _taken_download_options(options: dict[str, Any]) -> dict[str, Any]:
    """Takes those that say how a head is downloaded off the options of `enable`."""
    if options.keys() <= SpeculativeConfig.__dataclass_fields__.keys():
        return {}
    from .heads.download import DOWNLOAD_ARGUMENTS

    return {name: options.pop(name) for name in DOWNLOAD_ARGUMENTS if name in options}


@cache
def _speculative_class(original: Any) -> Any:
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (SpeculativeGenerationMixin, original), {**names, "_speculation_original": original})


def _original_class(cls: type) -> Any:
    """The class that `enable` built on, `None` if `cls` is not of its making."""
    return cls.__dict__.get("_speculation_original")


def _restore(original: type, state: dict[str, Any]) -> Any:
    cls = _speculative_class(original)
    model = cls.__new__(cls)
    model.__setstate__(state)
    return model
