"""The options of `train/generate.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..evaluation.prompts import InputError
from .arguments import DTYPES
from .target_writer import Sampling


@dataclass
class GenerateArguments:
    """The options of the command."""

    model: str = field(
        metadata={"help": "folder or Hub id of the target; with --endpoint, the name that the server knows it by"}
    )
    dataset: str = field(
        metadata={
            "help": "Hub id, file (JSON, JSON lines, Parquet, Arrow) or folder with `messages`, `conversations`, `prompt` "
            "or `turns`; replies in it are written anew, turn by turn"
        }
    )
    output: Path = field(
        metadata={"help": "the folder to write; if it has rows of the same settings, the run goes on from there"}
    )
    split: str = field(default="train", metadata={"help": "of the dataset"})
    subset: str | None = field(default=None, metadata={"help": "configuration of the dataset"})
    dataset_revision: str | None = field(default=None, metadata={"help": "revision of the dataset on the Hub"})
    streaming: bool = field(default=False, metadata={"help": "read the dataset as it is used"})
    exclude: list[str] = field(
        default_factory=list, metadata={"help": "datasets whose questions are left out: those that will be measured on"}
    )
    limit: int | None = field(default=None, metadata={"help": "how many questions at most, over all shards"})
    shard: str = field(default="0/1", metadata={"help": "this process and how many there are, as 0/4, 1/4, 2/4, 3/4"})
    system: str | None = field(default=None, metadata={"help": "system message for conversations that have none"})
    template_arguments: str = field(
        default="{}", metadata={"help": 'arguments of the chat template as JSON, for instance {"enable_thinking": false}'}
    )
    temperature: float = field(default=1.0, metadata={"help": "0 is greedy; use what will be served"})
    top_p: float = field(default=1.0, metadata={"help": "the share of the probability that is drawn from"})
    top_k: int = field(default=0, metadata={"help": "how many tokens are drawn from; 0 for all"})
    max_new_tokens: int = field(default=1024, metadata={"help": "the most tokens of a reply"})
    max_prompt_tokens: int | None = field(default=None, metadata={"help": "longer conversations are not answered"})
    drop_cut: bool = field(
        default=False, metadata={"help": "drop replies that the greatest length cut, rather than marking them"}
    )
    seed: int = field(default=0, metadata={"help": "of all randomness"})
    batch_size: int | None = field(
        default=None, metadata={"help": "conversations per batch, 8 by default; with --endpoint, per write to the disk, 256"}
    )
    revision: str | None = field(default=None, metadata={"help": "revision of the model"})
    dtype: str = field(default="auto", metadata={"help": "auto (as saved), float32, bfloat16 or float16"})
    device_map: str | None = field(default=None, metadata={"help": "of from_pretrained, for instance auto"})
    drafter: str | None = field(default=None, metadata={"help": "name of a drafter, or folder or Hub id of a draft head"})
    adaptive: bool = field(
        default=True,
        metadata={"help": "draft as much as pays by the clock; without it, runs repeat each other in rounding too"},
    )
    pack_for_cpu: bool = field(default=False, metadata={"help": "make products of a few tokens the quickest way on this CPU"})
    endpoint: str | None = field(
        default=None, metadata={"help": "address of a server with OpenAI's interface, for instance http://localhost:8000/v1"}
    )
    concurrency: int = field(default=32, metadata={"help": "requests to the server at the same time"})
    api_key_variable: str = field(default="OPENAI_API_KEY", metadata={"help": "environment variable with the server's key"})

    def __post_init__(self) -> None:
        for name in ("limit", "max_new_tokens", "max_prompt_tokens", "batch_size", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature must be a finite number of at least 0, got {self.temperature}.")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise InputError(f"--top-p must be in (0, 1] and --top-k at least 0, got {self.top_p} and {self.top_k}.")
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        self.process = _shard(self.shard)
        self.arguments_of_template = _json_object(self.template_arguments)

    @property
    def sampling(self) -> Sampling:
        """How replies are drawn."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.max_new_tokens)


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise InputError(f"--shard must be this process and their number, as 0/4 to 3/4, got {text!r}.")
    return int(number), int(count)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"--template-arguments must be a JSON object, got {text!r}: {error}.") from error
    if not isinstance(value, dict):
        raise InputError(f"--template-arguments must be a JSON object, got {text!r}.")
    return value
