"""What all heads have in common: a config that knows its target, and a model that loads completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from huggingface_hub import CommitInfo
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import check_saved_settings
from .download import DOWNLOAD_ARGUMENTS, find, find_config
from .facts import HeadFacts
from .provenance import check_target
from .repository import push, write_beside
from .results import MeasuredResults, TrainingRecord
from .saving import write_weights, written_together
from .target_parts import TargetParts

Head = TypeVar("Head", bound="DraftHead")

LAYER_ID_CONVENTION = "hidden_states"
# What transformers itself passes to every config, or writes into its file.
COMMON_FIELDS = {
    "_commit_hash", "_name_or_path", "attn_implementation", "experts_implementation", "model_type", "name_or_path",
    "num_labels", "output_attentions", "torch_dtype",
}  # fmt: skip
PUSH_ARGUMENTS = ("commit_message", "commit_description", "create_pr", "private", "revision", "tags", "token")
EXTRA_FILE = "specheads/confidence.safetensors"


class HeadConfig(PreTrainedConfig):
    """Fields of every head's config.

    Args:
        base_model: What `describe_target` says of the target that the head was made for.
        specheads_version: The version of this library that made the config.
        layer_id_convention: How feature layers are counted; always `"hidden_states"`: id k is what layer k reads.
        confidence: Whether the head also says how likely each draft is to be accepted.
        logit_scale: What the logits of the output layer are multiplied by, as the target does.
        final_logit_softcapping: The bound c of `c * tanh(logits / c)`, as the target has it, or `None`.
        embedding_multiplier: What the rows of the embedding table are multiplied by.
        training_data: What the head was trained on, as `specheads.training.data_provenance.describe_data` says it, the
            arguments of the chat template among it.
        target_adapter: Whether the head goes with an adapter of its target (Medusa-2), which lies in the folder `adapter`.
        speculative: Fields of `SpeculativeConfig` that `enable` takes where it is not told otherwise, or `None`.

    Raises:
        ValueError: if a field is not known, or holds a value outside of what is described.
    """

    base_model: dict[str, Any] | None = None
    specheads_version: str | None = None
    layer_id_convention: str = LAYER_ID_CONVENTION
    confidence: bool = False
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    training_data: dict[str, Any] | None = None
    target_adapter: bool = False
    speculative: dict[str, Any] | None = None

    # What goes into the file as `architectures`: the name under which serving engines know the layout.
    engine_architectures: ClassVar[list[str]] = []

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_known(kwargs)
        if self.layer_id_convention != LAYER_ID_CONVENTION:
            raise ValueError(
                f"`layer_id_convention` must be {LAYER_ID_CONVENTION!r}, got {self.layer_id_convention!r}; heads of other "
                "conventions are read with `specheads.import_head`."
            )
        check_saved_settings(self.speculative)
        if self.specheads_version is None:
            from .. import __version__

            self.specheads_version = __version__
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dict, as they go into `config.json`."""
        fields = super().to_dict()
        if self.engine_architectures:
            fields["architectures"] = list(self.engine_architectures)
        return fields

    @property
    def feature_layers(self) -> list[int]:
        """The layers whose hidden states the head reads, as indices into `hidden_states`."""
        raise NotImplementedError

    def check_layers(self, count: int) -> None:
        """Checks the feature layers against the target's number of layers.

        Raises:
            ValueError: if they are not those of a target with that many.
        """
        raise NotImplementedError

    def target_shapes(self) -> dict[str, int]:
        """What a target must have for the head to fit: `hidden_size` and `vocab_size`."""
        raise NotImplementedError

    def facts(self) -> HeadFacts:
        """What the head is, in words for its model card."""
        return HeadFacts("Draft head")

    def check_against(self, target: PreTrainedModel, tokenizer: Any = None, revision: str | None = None) -> TargetParts:
        """Checks that a target is the one that the head was made for; see `check_target`."""
        parts = check_target({**(self.base_model or {}), **self.target_shapes()}, target, tokenizer, revision)
        self.check_layers(parts.layers)
        return parts

    def _check_known(self, kwargs: dict[str, Any]) -> None:
        unknown = sorted(set(kwargs) - COMMON_FIELDS)
        if unknown:
            own = sorted(set(type(self).__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__))
            raise ValueError(
                f"Unknown field(s) {', '.join(unknown)} for {type(self).__name__}, which has {', '.join(own)}. A file with "
                f"other fields is of a newer version or another format (written by version {self.specheads_version}): for "
                "another format use `specheads.import_head`."
            )


class SharedParts(dict[str, nn.Module]):
    """Modules of the target that a head uses: not among its own, and not copied with it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedParts:
        return self


class DraftHead(PreTrainedModel):
    """A head: a small model that drafts from a target's hidden states.

    What it shares with its target, it is given by `bind`; that is neither saved nor counted among its weights.
    """

    main_input_name = "hidden_states"
    _supports_sdpa = True
    # Weights that engines do not know and would stumble over, so that they go into a file of their own.
    separate_weights: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        self._shared = SharedParts()

    def bind(self, target: PreTrainedModel, tokenizer: Any = None, revision: str | None = None) -> None:
        """Checks the target and takes what is shared with it, by reference.

        Args:
            target: The target that the head was made for.
            tokenizer: Its tokenizer, to be checked too.
            revision: The revision that the target was loaded at, to be checked too.

        Raises:
            ValueError: if the head does not fit the target.
        """
        parts = self.check_against(target, tokenizer, revision)
        self._shared = SharedParts({"embedding": parts.embedding, "output": parts.output})

    def check_against(self, target: PreTrainedModel, tokenizer: Any = None, revision: str | None = None) -> TargetParts:
        """Checks that a target is the one that the head was made for.

        Args:
            target: The target.
            tokenizer: Its tokenizer, if at hand.
            revision: The revision it was loaded at, if known.

        Returns:
            The target's parts.

        Raises:
            ValueError: if a shape or the vocabulary differs.

        Warns:
            UserWarning: if the weights, the revision or the chat template differ.
        """
        return self.config.check_against(target, tokenizer, revision)

    @classmethod
    def fresh(cls: type[Head], config: HeadConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Head:
        """A head with fresh weights in a precision. Casting a head would cast its rotary frequencies too, which stay single.

        Args:
            config: The config.
            dtype: The precision of its weights.
            device: Where it is to be.
        """
        return cls._from_config(config, dtype=dtype).to(device)

    @classmethod
    def from_pretrained(cls: type[Head], name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Loads a head as `PreTrainedModel.from_pretrained` does, with its arguments.

        Raises:
            FileNotFoundError: if there is no config.
            OSError: if the repository or the revision is not there, may not be read, or cannot be reached.
            ValueError: if a weight is missing, not known or of another shape; nothing is ever left at random.
        """
        wants_report = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # they are refused below, by name
        _, where = find_config(name_or_path, {name: kwargs[name] for name in DOWNLOAD_ARGUMENTS if name in kwargs})
        kwargs |= where
        head, report = super().from_pretrained(name_or_path, *args, output_loading_info=True, **kwargs)
        missing = set(report["missing_keys"]) | head._load_separate_weights(name_or_path, where)
        misshapen = {f"{name} of shape {list(found)}, not {list(own)}" for name, found, own in report["mismatched_keys"]}
        _refuse_incomplete(cls.__name__, name_or_path, missing, set(report["unexpected_keys"]), misshapen)
        head.check_loaded()
        return (head, report) if wants_report else head

    def check_loaded(self) -> None:
        """Checks what the weights' names and shapes do not tell.

        Raises:
            ValueError: if the head's vocabulary does not fit together.
        """

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        results: MeasuredResults | None = None,
        training: TrainingRecord | None = None,
        with_custom_generate: bool = False,
        **kwargs: Any,
    ) -> None:
        """Saves the head as `PreTrainedModel.save_pretrained` does, with a model card beside it.

        The files appear in the folder when all are written. A `README.md` of the user's own stays as it is, and so do results
        and record that were saved for the same weights, if no others are given.

        Args:
            save_directory: The folder.
            args: As for `PreTrainedModel.save_pretrained`.
            results: What was measured of the head, for the card.
            training: How the head was trained, for the card.
            with_custom_generate: Also write a `custom_generate/generate.py`, for
                `model.generate(custom_generate="user/head", trust_remote_code=True)`.
            kwargs: As for `PreTrainedModel.save_pretrained`, `tags` for the card among them.

        Raises:
            ValueError: if the results were measured with other weights.
        """
        if not kwargs.get("is_main_process", args[0] if args else True):
            return
        pushes, repository = kwargs.pop("push_to_hub", False), kwargs.pop("repo_id", None)
        hub = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
        beside: dict[str, Any] = {"results": results, "training": training, "with_custom_generate": with_custom_generate}
        weights = kwargs.pop("state_dict", None) or self.state_dict()
        separate = {name: weight for name, weight in weights.items() if name.startswith(self.separate_weights or ("\0",))}
        main = {name: weight for name, weight in weights.items() if name not in separate}
        with written_together(save_directory) as folder:
            super().save_pretrained(folder, *args, state_dict=main, **kwargs)
            if separate:
                write_weights(folder / EXTRA_FILE, separate)
            write_beside(self, folder, Path(save_directory), repo_id=repository, tags=hub.get("tags") or (), **beside)
        if pushes:
            given = {name: value for name, value in beside.items() if value}
            self.push_to_hub(repository or Path(save_directory).name, **hub, **given)

    def push_to_hub(self, repo_id: str, **arguments: Any) -> CommitInfo:
        """Saves the head into a repository of the Hub, which is made if it is not there: one commit.

        Args:
            repo_id: The repository, `"user/head"`.
            arguments: As for `PreTrainedModel.push_to_hub`: `commit_message`, `commit_description`, `private`, `token`,
                `revision`, `create_pr`, `max_shard_size`, `tags`; and `results`, `training`, `with_custom_generate` of
                `save_pretrained`.

        Returns:
            What the Hub says of the commit.

        Raises:
            TypeError: if an argument is not known.
            ValueError: if the results were measured with other weights.
            HfHubHTTPError: if the Hub refuses.
        """
        return push(self, repo_id, **arguments)

    def _load_separate_weights(self, name_or_path: str | os.PathLike[str], where: dict[str, Any]) -> set[str]:
        """Loads the weights that have a file of their own; gives the names of those that are not there."""
        own = {name: weight for name, weight in self.state_dict().items() if name.startswith(self.separate_weights or ("\0",))}
        if not own:
            return set()
        file = find(name_or_path, EXTRA_FILE, where)
        weights = load_file(file) if file is not None else {}
        with torch.no_grad():
            for name in own.keys() & weights.keys():
                own[name].copy_(weights[name])
        return own.keys() - weights.keys()

    def _of_target(self, part: str) -> nn.Module:
        if part not in self._shared:
            raise ValueError(f"The head shares the target's {part} layer: call `head.bind(target)` before it drafts.")
        return self._shared[part]


class ConfidenceHead(nn.Module):
    """How likely each draft is to be accepted (DSpark, arXiv 2607.05147): trained towards 1 - ½‖p - q‖₁.

    Args:
        size: h, what it reads.

    Attributes:
        trains_trunk: Whether its gradient goes on into what it reads. By default drafts do not suffer for being foretold.
    """

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)
        self.trains_trunk = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[...]` of acceptance from hidden states `[..., h]`."""
        return self.proj(hidden if self.trains_trunk else hidden.detach())[..., 0]


def _refuse_incomplete(name: str, where: Any, missing: set[str], unexpected: set[str], misshapen: set[str]) -> None:
    found = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    faults = [f"{fault} {', '.join(sorted(names))}" for fault, names in found.items() if names]
    if faults:
        raise ValueError(
            f"The weights in {where} are not those of this {name}: {'; '.join(faults)}. If the file is of another format, read "
            "it with `specheads.import_head`."
        )
