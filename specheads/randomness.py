"""The only place that draws. Everything random in a speculative call goes through one `Noise`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .blocks import BLOCK, block_sums, inside_block
from .config import SpeculativeConfig


class Noise(Protocol):
    """A source of random choices."""

    def draw(self, weights: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Draws one index per line, in proportion to its weights.

        Args:
            weights: `[R, V]`, non-negative, not necessarily normalised, each line with a positive sum.
            rows: For each line, the row of the batch it is drawn for.
            positions: For each line, the index of the token within that row's continuation.

        Returns:
            `[R]` indices, never one of weight zero.
        """
        ...


def noise_for(config: SpeculativeConfig, batch_size: int) -> Noise:
    """The noise that a call's settings ask for.

    Raises:
        ValueError: if `config.seed` is a list of another length than the batch.
    """
    seed = config.seed
    if isinstance(seed, Sequence) and len(seed) != batch_size:
        raise ValueError(f"`seed` lists {len(seed)} seeds for a batch of {batch_size} rows; give one seed per row.")
    if config.sampling_noise == "keyed":
        if isinstance(seed, Sequence):
            return KeyedNoise([(value, 0) for value in seed])
        return KeyedNoise([(int(seed or 0), row) for row in range(batch_size)])
    if isinstance(seed, Sequence):
        return RowwiseNoise(seed)
    return GeneratorNoise(seed)


def race(weights: Tensor, arrivals: Tensor) -> Tensor:
    """The winner of an exponential race: index i arrives at `arrivals_i / weights_i`, so i wins in proportion to its weight.

    Args:
        weights: `[R, V]`, non-negative.
        arrivals: `[R, V]`, standard exponentials.
    """
    # A zero weight has rate zero and cannot win; a zero arrival time would make it 0/0.
    return (weights / arrivals.clamp_min_(torch.finfo(arrivals.dtype).tiny)).argmax(dim=-1)


def pick(weights: Tensor, coins: Tensor) -> Tensor:
    """The index at which the running sum of the weights passes a share of their total: i with probability w_i / sum.

    First the block is found in which that happens, then the place in it: to sum up the whole vocabulary one by one takes a CPU
    ten times as long.

    Args:
        weights: `[R, V]`, non-negative.
        coins: `[R, 1]` in [0, 1), in double precision.
    """
    sums = block_sums(weights)  # [R, D + 1]
    block, left = _passing(sums, coins * sums.sum(dim=-1, keepdim=True, dtype=torch.double))
    place, _ = _passing(inside_block(weights, block), left)
    # Weights that are NaN, of a draft model that overflowed, are never passed, and what is drawn then does not matter.
    return (block * BLOCK + place)[:, 0].clamp_(max=weights.shape[-1] - 1)


def _passing(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The index `[R, 1]` at which the running sum of weights `[R, W]` passes a share `[R, 1]`, and what was left of that."""
    # In double precision, since in single a small weight would vanish beside the sum before it. The sum passes a share within
    # [0, total) only where a weight is positive.
    sums = weights.cumsum(dim=-1, dtype=torch.double)
    share = torch.minimum(share, sums[:, -1:].nextafter(sums.new_zeros(()))).clamp_(min=0)
    index = torch.searchsorted(sums, share, right=True).clamp_(max=weights.shape[-1] - 1)
    return index, share - (sums.gather(1, index) - weights.gather(1, index))


class GeneratorNoise:
    """Draws from a torch generator: torch's global one, or one of this call's own if a seed is given."""

    def __init__(self, seed: int | None = None):
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def draw(self, weights: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """See `Noise.draw`."""
        # One number a line: a number for every token, as a race has, costs more than all the rest of a round on a CPU.
        generator = self._generator(weights.device)
        return pick(weights, torch.rand(len(weights), 1, dtype=torch.double, device=weights.device, generator=generator))

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.seed is None:
            return None
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]


class RowwiseNoise:
    """One generator per row, so that a row draws the same numbers whatever rows stand beside it."""

    def __init__(self, seeds: Sequence[int]):
        self.sources = [GeneratorNoise(seed) for seed in seeds]

    def draw(self, weights: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """See `Noise.draw`."""
        lines = weights.split(1)
        return torch.cat([self.sources[row].draw(line, [row], []) for row, line in zip(rows, lines, strict=True)])


class KeyedNoise:
    """Noise that is a function of (seed, row, position, token) alone.

    The race of `draw` is Gumbel-max sampling in another guise, so one position's noise turns similar laws into mostly equal
    tokens: a drafter that draws with the same key agrees with the target as often as their laws allow, and the target's own
    tokens do not depend on the drafter (Daliri et al. 2024, "drafter invariance"). The bits are splitmix64's.
    """

    def __init__(self, keys: Sequence[tuple[int, int]]):
        self.states = [_mix_int(_mix_int(seed) + row * _GAMMA) for seed, row in keys]

    def draw(self, weights: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """See `Noise.draw`."""
        starts = [_mix_int(self.states[row] + position * _GAMMA) for row, position in zip(rows, positions, strict=True)]
        start = torch.tensor([_signed(value) for value in starts], device=weights.device)
        token = torch.arange(1, weights.shape[-1] + 1, device=weights.device)
        bits = _mix(start[:, None] + token * _signed(_GAMMA))
        uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
        return race(weights.double(), uniform.log_().neg_())


_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it logical.
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)
