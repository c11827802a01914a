"""Which hidden states the layer ids of a checkpoint mean.

EAGLE's code and vLLM count what a layer reads, which is how `hidden_states` is indexed; SpecForge, AngelSlim and ModelOpt count
what a layer gives, one less for the same hidden state. Ids alone do not tell, except for the defaults of either.
"""

from __future__ import annotations

from collections.abc import Sequence

CONVENTIONS = ("hidden_states", "layer_outputs")


def feature_layers(ids: Sequence[int] | None, layers: int, convention: str | None, where: str) -> list[int]:
    """The feature layers as indices into `hidden_states`.

    Args:
        ids: What the checkpoint says; `None` stands for either convention's default, which is the same layers.
        layers: n, the target's number of layers.
        convention: `"hidden_states"`, `"layer_outputs"`, or `None` to recognise it.
        where: The checkpoint, for messages.

    Raises:
        ValueError: if the convention is not known, cannot be recognised, or is plainly the other one.
    """
    if convention not in (None, *CONVENTIONS):
        raise ValueError(f"`layer_id_convention` must be one of {', '.join(CONVENTIONS)}, got {convention!r}.")
    default = usual_ids(layers)
    if ids is None:
        return default
    plain = {"hidden_states": default, "layer_outputs": [index - 1 for index in default]}
    recognised = next((name for name, usual in plain.items() if list(ids) == usual), None)
    if recognised and convention and recognised != convention:
        raise ValueError(
            f"The layer ids {list(ids)} of {where} are the usual ones of the convention {recognised!r} for a target of "
            f"{layers} layers, but {convention!r} was given; with the wrong one hardly a draft is accepted."
        )
    chosen = convention or recognised
    if chosen is None:
        raise ValueError(
            f"The layer ids {list(ids)} of {where} do not tell which hidden states they mean: pass "
            "`layer_id_convention='hidden_states'` if id k is what layer k reads (EAGLE, vLLM), or 'layer_outputs' if it is "
            "what layer k gives (SpecForge, AngelSlim, ModelOpt)."
        )
    return [index + (chosen == "layer_outputs") for index in ids]


def engine_layer_ids(ids: Sequence[int], layers: int | None) -> tuple[list[int], str] | None:
    """Layer ids such that SGLang reads the layers meant, and their convention; `None` if it is best told none.

    SGLang's own default is the usual layers. Given ids, it takes them for what layers give if the first is 1, else for what
    they read (sgl-project/sglang, PR 25454; before, it always did the former).

    Args:
        ids: The feature layers, as indices into `hidden_states`.
        layers: The target's number of layers, if known.

    Raises:
        ValueError: if no ids say it.
    """
    if layers is not None and list(ids) == usual_ids(layers):
        return None
    if ids[0] == 1:
        raise ValueError(
            f"SGLang takes layer ids that begin with 1 for another convention, so a head that reads the hidden states "
            f"{list(ids)} cannot be exported to it; export it as 'speculators'."
        )
    if ids[0] == 2:
        return [index - 1 for index in ids], "layer_outputs"
    return list(ids), "hidden_states"


def usual_ids(layers: int) -> list[int]:
    """The usual feature layers of a target with that many layers, as indices into `hidden_states`."""
    return [2, layers // 2, layers - 3]
