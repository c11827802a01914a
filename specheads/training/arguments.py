"""The options of `train/heads.py`: keys of a recipe and flags of the command are the same words."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from ..evaluation.prompts import InputError
from .laws import Sampling
from .losses import Objective
from .metrics import VERIFICATIONS, Deployment
from .step import TrainingSettings
from .weights import DepthWeights

HEADS = ("eagle3", "eagle1", "medusa")
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


@dataclass
class HeadArguments:
    """The target and the head."""

    model_name_or_path: str = field(metadata={"help": "folder or Hub id of the target, which is never written"})
    model_revision: str | None = field(default=None, metadata={"help": "revision of the target"})
    dtype: str = field(default="auto", metadata={"help": "of the target: auto (as saved), float32, bfloat16 or float16"})
    attn_implementation: str = field(default="sdpa", metadata={"help": "attention of the target: sdpa or eager"})
    head: str = field(default="eagle3", metadata={"help": f"the kind of head: {', '.join(HEADS)}"})
    head_name_or_path: str | None = field(
        default=None, metadata={"help": "folder or Hub id of a head to go on with, instead of a fresh one"}
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "how many tokens the head knows, the most frequent ones of the data; all if not given"}
    )
    num_heads: int = field(default=4, metadata={"help": "Medusa: how many heads, each for one token further"})
    num_hidden_layers: int = field(default=1, metadata={"help": "decoder layers of an EAGLE head, residual blocks of Medusa's"})
    dependence: str = field(
        default="none", metadata={"help": "Medusa: what a head knows of the tokens drafted before: none, hydra or markov"}
    )
    markov_rank: int = field(default=0, metadata={"help": "Medusa with markov: the rank of its matrix"})
    confidence: bool = field(default=False, metadata={"help": "also train how likely each draft is to be accepted"})
    warm_start: bool = field(default=True, metadata={"help": "start from the target's own layers rather than at random"})
    copying_groups: int | None = field(
        default=None,
        metadata={
            "help": "EAGLE-3: how many key heads, with their query heads, start by copying from earlier text; if not given, "
            "one of several, where the target's attention allows it"
        },
    )
    lora_rank: int = field(
        default=0,
        metadata={"help": "Medusa-2: the rank of an adapter of the target, trained together with the heads; 0 for none"},
    )
    lora_alpha: int = field(default=16, metadata={"help": "Medusa-2: the adapter's scale, divided by its rank"})
    lora_target_modules: str = field(
        default="all-linear",
        metadata={"help": "Medusa-2: which layers it adapts: all-linear (the output layer is not), or a regex"},
    )
    head_fields: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "further fields of the head's config, as JSON"}
    )

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise InputError(f"`head` must be one of {', '.join(HEADS)}, got {self.head!r}.")
        if self.head != "medusa" and (self.dependence != "none" or self.markov_rank):
            raise InputError("`dependence` and `markov_rank` are settings of Medusa heads; leave them out for EAGLE.")
        if (self.copying_groups or 0) < 0 or (self.copying_groups and self.head != "eagle3"):
            raise InputError(f"`copying_groups` must be at least 0, and 0 but for EAGLE-3 heads, got {self.copying_groups}.")
        if self.copying_groups and self.head_name_or_path is not None:
            raise InputError("`copying_groups` is how a fresh head starts; leave it out to go on with a trained one.")
        if self.lora_rank < 0 or (self.lora_rank and self.head != "medusa"):
            raise InputError(f"`lora_rank` must be at least 0, and 0 but for Medusa heads, got {self.lora_rank}.")
        if self.head == "eagle1" and self.draft_vocab_size is not None:
            raise InputError("EAGLE-1 uses the target's output layer, so it has no `draft_vocab_size`; leave it out.")
        if self.dtype not in DTYPES:
            raise InputError(f"`dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        self.head_fields = json_object(self.head_fields, "head_fields") or {}


@dataclass
class DataArguments:
    """The data."""

    dataset_name: list[str] = field(metadata={"help": "Hub ids, files or folders, as `train/generate.py` writes them"})
    dataset_split: str = field(default="train", metadata={"help": "which part of them"})
    dataset_subset: str | None = field(default=None, metadata={"help": "the name of a configuration"})
    dataset_revision: str | None = field(default=None, metadata={"help": "revision of datasets on the Hub"})
    streaming: bool = field(default=False, metadata={"help": "read the data as it is used; needs `max_steps`"})
    eval_dataset_name: list[str] = field(default_factory=list, metadata={"help": "data to evaluate on, as `dataset_name`"})
    eval_dataset_split: str = field(default="train", metadata={"help": "which part of that"})
    eval_examples: int = field(
        default=0, metadata={"help": "how many examples of the training data are kept aside to evaluate on"}
    )
    eval_task_column: str | None = field(
        default=None,
        metadata={"help": "column of that data that names each row's task; tasks are measured one by one at the end"},
    )
    template_arguments: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "arguments of the chat template as JSON; those that the data was written under if not given"},
    )
    learn_prompts: bool = field(
        default=False, metadata={"help": "also learn what the target makes of the prompts: more to learn from the same passes"}
    )
    max_length: int = field(default=2048, metadata={"help": "tokens of an example at most; what comes later is cut off"})
    packing: bool = field(default=False, metadata={"help": "put several examples into a row"})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "processes that tokenise"})
    feature_store: str | None = field(
        default=None, metadata={"help": "folder for the target's hidden states, which are then computed once for all epochs"}
    )
    feature_store_gib: float | None = field(default=None, metadata={"help": "how large that folder may get"})

    def __post_init__(self) -> None:
        if self.eval_dataset_name and self.eval_examples:
            raise InputError("Evaluate either on `eval_dataset_name` or on `eval_examples` of the training data, not on both.")
        if self.max_length < 2 or self.eval_examples < 0:
            raise InputError(
                f"`max_length` must be at least 2 and `eval_examples` at least 0, got {self.max_length} and "
                f"{self.eval_examples}."
            )
        if self.streaming and self.eval_examples:
            raise InputError("A stream has no examples to keep aside; name an `eval_dataset_name`.")
        if self.feature_store is not None and (self.streaming or self.packing):
            raise InputError("A `feature_store` holds texts one by one; train without `streaming` and `packing`.")
        self.template_arguments = json_object(self.template_arguments, "template_arguments")


@dataclass
class HeadTrainingArguments(TrainingArguments):
    """How to train, and how drafts will be made and verified; for the rest see `transformers.TrainingArguments`."""

    depth: int = field(default=5, metadata={"help": "how many tokens a draft has in training"})
    loss: dict[str, Any] | str | None = field(
        default="lk_log",
        metadata={"help": "a loss, a named mixture, or losses with weights as JSON (`specheads.training.losses`)"},
    )
    depth_weights: dict[str, Any] | str | None = field(
        default="length_aware", metadata={"help": 'how much each depth counts: a name, or {"geometric": 0.8} as JSON'}
    )
    confidence_weight: float = field(default=1.0, metadata={"help": "the weight of the confidence head's loss"})
    on_policy: float = field(
        default=0.0, metadata={"help": "0 to 1: how far places count by how likely a round of drafting starts there"}
    )
    feature_noise: float = field(default=0.0, metadata={"help": "half the width of uniform noise on the target's features"})
    chunk_roots: int | None = field(default=None, metadata={"help": "how many places have logits at once"})
    temperature: float = field(default=1.0, metadata={"help": "how the target will be served; 0 is greedy"})
    top_k: int = field(default=0, metadata={"help": "how many tokens it is served with; 0 for all"})
    top_p: float = field(default=1.0, metadata={"help": "the share of the probability that it is served with"})
    verification: str = field(default="block", metadata={"help": f"how drafts are verified: {', '.join(VERIFICATIONS)}"})
    draft_temperature: float | None = field(
        default=None, metadata={"help": "how drafts are sampled; the target's temperature if not given"}
    )
    heads_alone: float = field(
        default=0.3,
        metadata={"help": "Medusa-2: the share of the steps in which the heads learn alone, before the adapter does"},
    )
    self_distillation: float = field(
        default=10.0, metadata={"help": "Medusa-2: how much the adapted target is held to what it said without its adapter"}
    )
    lora_learning_rate: float = field(default=1e-4, metadata={"help": "Medusa-2: the adapter's highest learning rate"})
    generate_prompts: int = field(
        default=8, metadata={"help": "prompts that each evaluation has `generate` answer, to measure what it predicts"}
    )
    generate_tokens: int = field(default=64, metadata={"help": "the most tokens of those answers"})

    muon_learning_rate: float | None = field(
        default=None,
        metadata={"help": "train the matrices of a head's layers with Muon, at this rate at most; AdamW for all if not given"},
    )

    # What is usual for heads, where that is not what `transformers` has.
    learning_rate: float = field(default=1e-4, metadata={"help": "the highest learning rate"})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "the schedule of the learning rate"})
    warmup_steps: float = field(default=0.015, metadata={"help": "steps of warming up, or below 1 their share"})
    max_grad_norm: float = field(default=0.5, metadata={"help": "the norm that gradients are clipped to"})
    num_train_epochs: float = field(default=1.0, metadata={"help": "how often to go through the data"})
    logging_steps: float = field(default=10, metadata={"help": "steps between reports"})
    save_total_limit: int | None = field(default=2, metadata={"help": "how many checkpoints are kept"})
    report_to: None | str | list[str] = field(  # noqa: RUF036, the order that the parser can read
        default="none", metadata={"help": "wandb, trackio, tensorboard, ... or none"}
    )
    train_sampling_strategy: str = field(
        default="group_by_length", metadata={"help": "group_by_length (batches of like lengths), random or sequential"}
    )
    metric_for_best_model: str | None = field(
        default="mean_acceptance_length", metadata={"help": "what the best checkpoint is best at"}
    )
    dataloader_pin_memory: bool = field(
        default=torch.accelerator.is_available(), metadata={"help": "pin the memory of batches that go to an accelerator"}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "of no use here: the data has the columns it needs"})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "see `TrainingArguments`"})

    def __post_init__(self) -> None:
        self.loss = _name_or_object(self.loss, "loss")
        self.depth_weights = _name_or_object(self.depth_weights, "depth_weights")
        try:
            self.settings, self.deployment = self._settings(), self._deployment()
        except ValueError as error:
            raise InputError(str(error)) from error
        self._check_numbers()
        super().__post_init__()
        if self.muon_learning_rate is not None and not str(self.optim.value).startswith("adamw_torch"):
            raise InputError(f"With `muon_learning_rate` all other weights are trained by adamw_torch, got {self.optim.value}.")
        if self.train_sampling_strategy not in ("group_by_length", "random", "sequential"):
            raise InputError(
                "`train_sampling_strategy` must be group_by_length, random or sequential, got "
                f"{self.train_sampling_strategy!r}."
            )

    def _check_numbers(self) -> None:
        """Those that would break the training off once the target is loaded and the data read."""
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        for name in ("learning_rate", "lora_learning_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"`{name}` must be a finite number of at least 0, got {getattr(self, name)}.")
        if self.muon_learning_rate is not None and not 0 <= self.muon_learning_rate < math.inf:
            raise InputError(f"`muon_learning_rate` must be a finite number of at least 0, got {self.muon_learning_rate}.")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"`seed` must be from 0 to {2**32 - 1}, got {self.seed}.")

    def _settings(self) -> TrainingSettings:
        # A greedy target has no law to learn from: its law at temperature 1 holds more than its most probable token.
        sampling = Sampling(self.temperature, self.top_k, self.top_p) if self.temperature else Sampling()
        return TrainingSettings(
            depth=self.depth,
            objective=Objective.parse(self.loss or {}),
            weights=DepthWeights.parse(self.depth_weights or {}),
            sampling=sampling,
            confidence_weight=self.confidence_weight,
            on_policy=self.on_policy,
            feature_noise=self.feature_noise,
            chunk_roots=self.chunk_roots,
        )

    def _deployment(self) -> Deployment:
        return Deployment(Sampling(self.temperature, self.top_k, self.top_p), self.verification, self.draft_temperature)


def json_object(value: Any, name: str) -> dict[str, Any] | None:
    """A JSON object that a recipe or a flag holds; `None` stays.

    Raises:
        InputError: if it is something else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InputError(f"`{name}` must be a JSON object, got {value!r}: {error}.") from error
    if value is not None and not isinstance(value, dict):
        raise InputError(f"`{name}` must be a JSON object, got {value!r}.")
    return value


def _name_or_object(value: Any, name: str) -> Any:
    return json_object(value, name) if isinstance(value, str) and value.lstrip().startswith("{") else value
