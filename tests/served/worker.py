"""Runs in vLLM's own environment: does jobs one after the other, and says what came out.

    python worker.py jobs.json results.json

A job: `target` (a folder), `head` (what vLLM takes as `speculative_config`, or null for the target alone), `prompts` (lists of
ids) and `max_tokens`. Its result: `tokens` of each prompt; with a head also `drafts` (each round's draft, of each prompt),
`accepted` (how much of it held, by the engine's own record), `accepted_per_position` (the engine's counters, over all prompts),
`engine_only` and `file_only`: names of weights that the engine's draft model and the head's file do not have alike. Where the
engine refuses the head, the result is its `error` alone.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

# The engine runs in this process, where its weights can be looked at, and leaves the choice of cores to whoever started it.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

# What the engine keeps side by side in one weight, in this order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Names of the layouts of EAGLE-3's and Medusa's own code among them.
ENGINE_NAMES = (
    (r"^d2t$", "draft_id_to_target_id"),
    (r"^midlayer\.", "layers.0."),
    (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
    (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
)
# `t2d` says what `d2t` says; the engine goes by the latter alone.
UNREAD = {"t2d"}

loaded: dict[str, dict[str, Tensor]] = {}  # weights by the folder they were loaded from, as they were before they were packed
_load_weights = DefaultModelLoader.load_weights


def load_weights(self: Any, model: nn.Module, model_config: Any) -> None:
    _load_weights(self, model, model_config)
    loaded[model_config.model] = {own_name(name): weight.detach().clone() for name, weight in model.named_parameters()}


DefaultModelLoader.load_weights = load_weights


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job."""
    head = job["head"]
    llm = LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=head,
        per_request_spec_decode_metrics="detailed" if head else "none",
    )
    drafts: list[list[int]] = llm.collective_rpc(watch)[0] if head else []
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    result: dict[str, Any] = {"tokens": []} if head is None else {"tokens": [], "drafts": [], "accepted": []}
    for ids in job["prompts"]:
        drafts.clear()
        output = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0].outputs[0]
        result["tokens"].append(list(output.token_ids))
        if head:
            accepted = output.spec_decode_metrics.per_step_accepted
            result["accepted"].append(accepted)
            result["drafts"].append(drafts[: len(accepted)])  # the engine drafts once more when all is said
    if head:
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        result["accepted_per_position"] = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        result |= llm.collective_rpc(weights_apart, args=(head["model"],))[0]
    return result


def watch(worker: Any) -> list[list[int]]:
    """A list that every draft of the engine is added to."""
    drafts: list[list[int]] = []
    drafter = worker.model_runner.drafter
    propose = drafter.propose

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        drafted = propose(*args, **kwargs)
        drafts.extend(drafted.tolist())
        return drafted

    drafter.propose = noted
    return drafts


def weights_apart(worker: Any, folder: str) -> dict[str, list[str]]:
    """Names of weights that the engine's draft model and the head's file do not have alike."""
    runner = worker.model_runner
    of_target = {id(weight) for weight in runner.model.parameters()}
    # What the engine took from the target in the end, whether the file has it or not.
    shared = {own_name(name): weight for name, weight in runner.drafter.model.named_parameters() if id(weight) in of_target}
    engine = {**loaded[folder], **{name: weight.detach() for name, weight in shared.items()}}
    (path,) = Path(folder).glob("*.safetensors")
    file = as_engine(load_file(str(path)))
    alike = {name for name in file.keys() & engine.keys() if same(file[name], engine[name])}
    return {
        "file_only": sorted(file.keys() - alike),
        "engine_only": sorted(engine.keys() - alike - (shared.keys() - file.keys())),
    }


def own_name(name: str) -> str:
    return name.removeprefix("model.")


def as_engine(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A file's weights under the engine's names, fused as the engine fuses them."""
    weights = {name: weight for name, weight in weights.items() if name not in UNREAD}
    for pattern, name_there in ENGINE_NAMES:
        weights = {re.sub(pattern, name_there, name): weight for name, weight in weights.items()}
    for fused, parts in FUSED.items():
        for name in [name for name in weights if f".{parts[0]}." in name]:
            names = [name.replace(parts[0], part) for part in parts]
            if all(part in weights for part in names):
                weights[name.replace(parts[0], fused)] = torch.cat([weights.pop(part) for part in names])
    return weights


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the engine has our weight; it may have more rows, where it pads its vocabulary."""
    return ours.shape[1:] == theirs.shape[1:] and len(ours) <= len(theirs) and torch.equal(ours, theirs[: len(ours)])


def served_or_refused(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return serve(job)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        loaded.clear()
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    jobs_file, results_file = map(Path, sys.argv[1:])
    results = []
    for job in json.loads(jobs_file.read_text()):
        results.append(served_or_refused(job))
        results_file.write_text(json.dumps(results))
