"""The adapter of a target that some heads go with (Cai et al. 2024, Medusa-2): the target is then the adapted model.

It lies beside the head in the folder `adapter`, as peft saves adapters.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

FOLDER = "adapter"
NAME = "specheads"  # under which peft keeps it
CONFIG, WEIGHTS = f"{FOLDER}/adapter_config.json", f"{FOLDER}/adapter_model.safetensors"


def adapt(target: PreTrainedModel, config: Any) -> None:
    """Gives a target a fresh adapter, which changes nothing yet.

    Args:
        target: The target.
        config: A config of peft's.

    Raises:
        ValueError: if it has one already.
    """
    if any(_layers(target)):
        raise ValueError("The target has an adapter already, and a head goes with one of its own: merge it, or take it away.")
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, target, NAME)


@contextmanager
def unadapted(target: PreTrainedModel) -> Iterator[None]:
    """The target without its adapter, for a while."""
    layers = list(_layers(target))
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_weights(target: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a target's adapter, as peft names them."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(target, adapter_name=NAME)


def set_adapter_weights(target: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Sets them.

    Raises:
        ValueError: if they are not those of this adapter.
    """
    from peft import set_peft_model_state_dict

    if weights.keys() != (own := adapter_weights(target)).keys():
        wrong = sorted(weights.keys() ^ own.keys())
        raise ValueError(
            f"The adapter's weights are not those of this target's: {', '.join(wrong[:5])} are missing or too many."
        )
    set_peft_model_state_dict(target, dict(weights), adapter_name=NAME)


def goes_with(head: Any) -> bool:
    """Whether a head, if there is one, was trained together with an adapter of its target."""
    return bool(getattr(getattr(head, "config", None), "target_adapter", False))


def load_adapter(target: PreTrainedModel, name_or_path: str | os.PathLike[str], **download: Any) -> None:
    """Gives a target the adapter that a head goes with.

    Args:
        target: The target.
        name_or_path: The head's folder, or the id of its repository.
        download: As for `find_config`.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if the target has one already, or it is another target's.

    Warns:
        UserWarning: always: what is generated is the adapted model's from now on.
    """
    from peft import LoraConfig

    from .heads.download import find, find_config

    _, download = find_config(name_or_path, download)
    config, weights = (find(name_or_path, name, download) for name in (CONFIG, WEIGHTS))
    if config is None or weights is None:
        raise FileNotFoundError(
            f"The head {name_or_path} goes with an adapter of its target, which is not in its folder {FOLDER}."
        )
    adapt(target, LoraConfig.from_pretrained(str(Path(config).parent)))
    set_adapter_weights(target, load_file(weights))
    target.requires_grad_(False)
    warnings.warn(
        f"The head {name_or_path} goes with an adapter, which the model now has: what is generated, with drafts and without, "
        "is that of the adapted model. `specheads.disable` takes it away.",
        stacklevel=5,
    )


def save_adapter(target: PreTrainedModel, folder: Path) -> None:
    """Saves a target's adapter into the folder of a head."""
    from .heads.saving import write_weights

    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    cast(Any, target).peft_config[NAME].save_pretrained(place)
    write_weights(place / Path(WEIGHTS).name, adapter_weights(target))


def remove_adapter(target: Any) -> None:
    """Takes the adapter of a head away: the target is what it was."""
    for name, layer in [(name, module) for name, module in target.named_modules() if isinstance(module, _layer_class())]:
        parent, _, own = name.rpartition(".")
        setattr(target.get_submodule(parent), own, layer.get_base_layer())
    del target.peft_config


def _layers(target: PreTrainedModel) -> Iterator[Any]:
    return (module for module in target.modules() if isinstance(module, _layer_class()))


def _layer_class() -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return BaseTunerLayer
