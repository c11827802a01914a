"""The benchmark harness `lm-eval`, speculating: `python -m specheads.evaluation.lm_eval --model specheads ...`.

The harness knows a model by the name `specheads` once this module is imported, and it imports none but its own: hence a command
of this library, which takes the arguments of `lm_eval`. Tasks that generate are answered in fewer passes of the
target; tasks that score given answers are passed on as they are.
"""

from __future__ import annotations

import sys
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from ..mixin import enable
from ..stats import SpeculationStats
from .bench import load_model
from .loading import options_of


@register_model("specheads")
class SpeculativeLM(HFLM):
    """The harness's model of the transformers library, with a drafter.

    Args:
        pretrained: As for the harness's `hf`.
        drafter: What drafts: a drafter's name, or the folder or Hub id of a head; the default drafter if left out.
        draft_model: Folder or Hub id of a smaller model that drafts, in place of it.
        draft_tokens: The most tokens drafted along a path.
        tree_nodes: The most nodes of a draft tree.
        adaptive: Whether less is drafted where it does not pay.
        pack_for_cpu: Whether the target's weights are prepacked.
        **arguments: All others of `hf`.

    Raises:
        ValueError: if the drafter does not fit, or if both kinds are given.
    """

    def __init__(
        self,
        pretrained: Any,
        drafter: str | None = None,
        draft_model: str | None = None,
        draft_tokens: int | None = None,
        tree_nodes: int | None = None,
        adaptive: bool = True,
        pack_for_cpu: bool = False,
        **arguments: Any,
    ):
        if drafter is not None and draft_model is not None:
            raise ValueError(f"Give either drafter={drafter} or draft_model={draft_model}, not both.")
        super().__init__(pretrained, **arguments)
        chosen: Any = drafter if draft_model is None else load_model(draft_model)
        fields = {**options_of(draft_tokens, tree_nodes), "adaptive": adaptive}
        enable(self.model, drafter=chosen, tokenizer=self.tokenizer, pack_for_cpu=pack_for_cpu, **fields)
        self.rounds = self.emitted = 0

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation: Any) -> Tensor:
        """As the harness's own, speculatively."""
        generation |= {"speculative": True, "return_dict_in_generate": True}
        output = super()._model_generate(context, max_length, stop, **generation)
        stats: SpeculationStats = output.speculation
        self.rounds += stats.num_spec_steps
        self.emitted += stats.num_emitted_tokens
        sequences: Tensor = output.sequences
        return sequences

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the scores; here also how many tokens a pass of the target gave."""
        length = self.emitted / self.rounds if self.rounds else None
        return {**super().get_model_info(), "mean_acceptance_length": length}


def main(arguments: list[str] | None = None) -> int:
    """Runs the harness's command.

    Args:
        arguments: The command line of `lm_eval`; that of the process if `None`.

    Returns:
        0; what fails is raised.
    """
    if arguments is not None:
        sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
