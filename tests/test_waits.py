"""How often a round waits for the device: once where tokens are matched, twice where laws are weighed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import specheads
from specheads import EagleHead
from tests import pretended
from tests.pretended import FIRST, HOST, Pretended, aten, devices
from tests.tiny import perturbed, tiny

# What hands numbers to the host.
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default}


class Waits:
    """Counts what waits for a pretended device.

    Attributes:
        count: How many times so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Counts an operation if it hands numbers of the device to the host."""
        target = torch.device(kwargs.get("device") or FIRST)
        copies = func is aten._to_copy.default and target == HOST
        copies |= func is aten.copy_.default and not isinstance(args[0], Pretended)
        self.count += (func in READS or copies) and any(isinstance(each, Pretended) for each in args)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    counted, run, tolist = Waits(), pretended._run, Pretended.tolist

    def noted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        counted.note(func, args, kwargs)
        return run(func, args, kwargs)

    def listed(self: Pretended) -> Any:
        counted.count += 1
        return tolist(self)

    monkeypatch.setattr(pretended, "_run", noted)
    monkeypatch.setattr(Pretended, "tolist", listed)
    with devices():
        yield counted


def per_round(waits: Waits, batch_size: int, tokens: tuple[int, int] = (6, 14), **arguments: Any) -> float:
    """Waits per round: those of the longer of two calls that the shorter one does not have."""
    model = specheads.enable(tiny()).to(FIRST)
    ids = torch.tensor([[3, 5, 7, 5, 7, 5, 7, 5]] * batch_size).to(FIRST)
    seen = []
    for size in tokens:
        waits.count = 0
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=size, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, **arguments,
        )  # fmt: skip
        rounds = out.speculation.num_spec_steps / batch_size  # the rows are alike
        seen.append((waits.count, rounds))
    (less, few), (more, many) = seen
    return (more - less) / (many - few)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("drafter", ["none", "lookup", "suffix"])
def test_matched_tokens(drafter: str, batch_size: int, waits: Waits) -> None:
    settings = {"drafter": drafter, "adaptive": False, "draft_tokens": 2}
    assert per_round(waits, batch_size, do_sample=False, speculative=settings) == 1


@pytest.mark.parametrize(("sampled", "most"), [(False, 2), (True, 3)])
def test_draft_models(sampled: bool, most: int, waits: Waits) -> None:
    """One wait more, for what the draft model has run on: it is over before the target's pass begins."""
    draft = perturbed(tiny(), 0.05).to(FIRST)
    settings = {"adaptive": False, "draft_tokens": 2}
    assert per_round(waits, 1, do_sample=sampled, speculative=settings, assistant_model=draft) <= most


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("nodes", [None, 6])
def test_heads(nodes: int | None, batch_size: int, waits: Waits) -> None:
    """A chain that goes on as far as it may, and a tree of the head's and of copies."""
    settings = {"adaptive": False, "draft_tokens": 2, "tree_nodes": nodes}
    head = EagleHead.from_target(tiny()).to(FIRST)
    assert per_round(waits, batch_size, do_sample=False, speculative=settings, assistant_model=head) == 1
