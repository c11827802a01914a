"""The settings of a speculative `generate` call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

VERIFICATION_MODES = ("auto", "match", "token", "block", "traversal")
SAMPLING_NOISES = ("generator", "keyed")


@dataclass
class SpeculativeConfig:
    """How to draft and how to verify. None of these fields changes the law of the output.

    Args:
        drafter: Name of a drafter that needs no model besides: `"auto"`, `"suffix"`, `"recycling"`, `"lookup"`, `"lookahead"`,
            `"none"`, `"retrieval:FOLDER"` with the folder of a datastore, `"early-exit"`, `"early-exit:N"` with a number of
            layers, `"mtp"`; `"wrong"` to measure; or the folder or Hub id of a head. Used where no drafter was attached to the
            model or passed to the call, or this one is named in the call. `None` stands for `"auto"`.
        draft_tokens: The most tokens drafted along one path in a round (K in the literature).
        tree_nodes: The most nodes in a draft tree. `None` drafts a single path.
        verification: `"auto"`, `"match"`, `"token"` (Leviathan et al. 2023), `"block"` (Sun et al. 2025) or
            `"traversal"` (its form for trees). `"auto"` takes what accepts most for the draft at hand.
        draft_temperature: Temperature of a sampling draft model in place of the target's. 0 drafts its most probable token.
        adaptive: Measure what passes cost and how much is accepted, and draft less where it does not pay.
        seed: Seed of this call, or one seed per row. `None` draws from torch's global generator, as `generate` does.
        sampling_noise: `"generator"`, or `"keyed"`: the noise is a function of seed, row and position, so that the
            sampled text does not depend on the drafter.
        per_step: Keep the numbers of drafted and accepted tokens of every round in the statistics.
        per_step_drafts: Keep there what was drafted in every round, too.

    Raises:
        ValueError: if a field holds a value outside of what is described above.
    """

    drafter: str | None = None
    draft_tokens: int = 8
    tree_nodes: int | None = None
    verification: str = "auto"
    draft_temperature: float | None = None
    adaptive: bool = True
    seed: int | Sequence[int] | None = None
    sampling_noise: str = "generator"
    per_step: bool = field(default=False)
    per_step_drafts: bool = field(default=False)

    def __post_init__(self) -> None:
        if self.drafter is not None and not isinstance(self.drafter, str):
            raise ValueError(
                f"`drafter` must be the name of a drafter, got {type(self.drafter).__name__}; "
                "attach a model or heads with `specheads.enable(model, drafter=...)`."
            )
        _check_count("draft_tokens", self.draft_tokens, at_least=0)
        if self.tree_nodes is not None:
            _check_count("tree_nodes", self.tree_nodes, at_least=1)
        _check_choice("verification", self.verification, VERIFICATION_MODES)
        _check_choice("sampling_noise", self.sampling_noise, SAMPLING_NOISES)
        for name in ("adaptive", "per_step", "per_step_drafts"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")
        temperature = self.draft_temperature
        if temperature is not None and not (isinstance(temperature, int | float) and 0 <= temperature < float("inf")):
            raise ValueError(f"`draft_temperature` must be a finite number of at least 0, got {temperature!r}.")
        self._check_seed()

    def _check_seed(self) -> None:
        seeds = [] if self.seed is None else [self.seed] if isinstance(self.seed, int) else self.seed
        if isinstance(seeds, str) or not isinstance(seeds, Sequence) or any(type(seed) is not int for seed in seeds):
            raise ValueError(f"`seed` must be an integer or a list of one integer per row, got {self.seed!r}.")
        if any(not -(2**63) <= seed < 2**64 for seed in seeds):
            raise ValueError(f"A `seed` must fit into 64 bits, got {self.seed!r}.")
        if self.sampling_noise == "keyed":
            if self.seed is None:
                raise ValueError('`sampling_noise="keyed"` needs a `seed`: the noise is a function of it.')
            if self.verification not in ("auto", "match"):
                raise ValueError(
                    f'`sampling_noise="keyed"` works through match verification, got verification={self.verification!r}; '
                    'use "auto" or "match".'
                )

    @classmethod
    def from_value(cls, value: bool | Mapping[str, Any] | SpeculativeConfig, default: SpeculativeConfig) -> SpeculativeConfig:
        """Reads the `speculative=` argument of `generate`.

        Args:
            value: `True`, a dict of fields, or a config.
            default: The settings that `True` and the unnamed fields of a dict fall back to.

        Raises:
            ValueError: if a dict names an unknown field.
            TypeError: if `value` is of another type.
        """
        if value is True:
            return default
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_options({**default.to_dict(), **value})
        raise TypeError(
            f"`speculative` must be True, False, a SpeculativeConfig or a dict of its fields, got {type(value).__name__}."
        )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """Builds a config from keyword options, refusing unknown ones by name."""
        known = [f.name for f in fields(cls)]
        unknown = [str(name) for name in options if name not in known]
        if unknown:
            raise ValueError(f"Unknown speculative option(s) {', '.join(unknown)}; known are {', '.join(known)}.")
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dict."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def check_saved_settings(settings: Any) -> None:
    """Checks what a head's config says of how it is to be used.

    Raises:
        ValueError: if it is not `None` or a mapping of fields of `SpeculativeConfig`, or names a drafter.
    """
    if settings is None:
        return
    if not isinstance(settings, Mapping) or "drafter" in settings:
        raise ValueError(
            f"A head's `speculative` must be None or have fields of SpeculativeConfig other than `drafter`, got {settings!r}."
        )
    SpeculativeConfig.from_options(settings)


def _check_count(name: str, value: Any, at_least: int) -> None:
    if type(value) is not int or value < at_least:
        raise ValueError(f"`{name}` must be an integer of at least {at_least}, got {value!r}.")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")
