"""Speculative decoding with the draft head of this repository.

    model.generate(**inputs, custom_generate="user/head", trust_remote_code=True)

Everything else that `generate` takes goes through; `speculative={...}` has the settings, and `revision`, `token`, `cache_dir`,
`local_files_only` and `subfolder` say how the head is downloaded. The code is in the package `specheads`.
"""

from typing import Any


def generate(model: Any, **arguments: Any) -> Any:
    """Generates with the model and this repository's head: the same law as without, in fewer passes of the model."""
    try:
        from specheads.recipe import generate_with_head
    except ImportError as error:
        raise ImportError(
            "This repository's draft head is run by the package specheads: `pip install -U specheads`."
        ) from error
    return generate_with_head(model, arguments)
