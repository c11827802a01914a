"""Heads of this library in vLLM: what it loads of them, what it drafts with them, and what it cannot serve.

What an engine ignores it does not tell: with a head that it reads otherwise than was meant the text is still right, only
slower. So its weights are compared with the file's, and its drafts with ours, token by token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

import specheads
from specheads.demo import PROMPTS
from specheads.evaluation.prompts import Prompt, encode
from specheads.evaluation.smollm2 import load_smollm2, smollm2_folder
from tests.served.conftest import Serve
from tests.served.heads import VOCABULARY, Maker, Served
from tests.served.learning import Texts, learn_eagle, learn_medusa
from tests.served.rounds import Text, acceptance, drafted_alike, generated

pytestmark = [pytest.mark.served, pytest.mark.timeout(7200)]

TOKENS = 32  # of each continuation
FEW = 10  # of those with heads that have random weights
# Where the two best tokens are as good as tied, engines may round to either; nothing else may differ.
ALIKE = 0.98  # of the drafted tokens, at least
SHARE = 0.05  # between the acceptances at a position, at most

LEARNT = ("eagle3", "eagle1", "medusa")
VARIANTS = {
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "qwen-layer": {"transformer_layer_config": {"model_type": "qwen3"}, "draft_tokens": None},
    "two-layers": {"transformer_layer_config": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}},
    "own-size": {
        "transformer_layer_config": {"hidden_size": 384, "num_attention_heads": 6, "head_dim": 64, "intermediate_size": 1024}
    },
    "edge-layers": {"eagle_aux_hidden_state_layer_ids": [0, 29], "confidence": True},
}
MEDUSA = {
    "medusa-shared-output": {},
    "medusa-output-bias": {"output_bias": True},
    "medusa-markov": {"dependence": "markov", "markov_rank": 8},
    "medusa-hydra": {"dependence": "hydra"},
    "medusa-vocabulary": {"draft_tokens": VOCABULARY},
}
EAGLE_1 = {
    "eagle1-bias": {"fc_bias": True},
    "eagle1-norms": {"fc_bias": False, "add_para_norm": True},
    "eagle1-saved": {"fc_bias": False},
}
# Those of them that are served as they were meant.
SERVED = ("eagle3-exported", *VARIANTS, "medusa-shared-output")
# The engine makes this weight and has no use for it.
UNUSED = ["layers.1.hidden_norm.weight"]
# What it leaves out of a head, without a word, so that it drafts otherwise.
IGNORED = {
    "eagle1-bias": ["fc.bias"],
    "medusa-output-bias": ["lm_head.bias"],
    "medusa-markov": ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"],
}
# Why it does not load a head.
REFUSED = {
    "eagle1-saved": "Please ensure you're loading a speculators-format model",
    "eagle1-norms": "no module or parameter named 'embedding_layernorm'",
    "eagle3-renamed": "no module or parameter named 'last'",
    "medusa-vocabulary": "not initialized from checkpoint: {'token_map'}",
    "medusa-hydra": r"load weight \(torch.Size\(\[576, 1152\]\)\) into parameter",
    "medusa-exported": r"into parameter \(torch.Size\(\[4096, 4096\]\)\)",
    "medusa-too-few": "not initialized from checkpoint: .*blocks.3.layers.0",
    "medusa-renamed": "not initialized from checkpoint: {'blocks.1.layers.0.weight'}",
}


@dataclass
class Runs:
    """What was served, and what came out.

    Args:
        target: The target.
        prompts: Ids of each prompt.
        heads: By name.
        results: The engine's, by name (see `worker.py`).
        plain: The engine's texts without a head.
        own: Our texts, by the head's name.
    """

    target: Any
    prompts: list[list[int]]
    heads: dict[str, Served]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    plain: list[list[int]] = field(default_factory=list)
    own: dict[str, list[Text]] = field(default_factory=dict)

    def job(self, name: str | None) -> dict[str, Any]:
        is_short = name is not None and name.removesuffix("-shifted") not in LEARNT
        return {
            "target": str(smollm2_folder()),
            "head": None if name is None else self.heads[name].speculative_config(),
            "prompts": self.prompts[:1] if is_short else self.prompts,
            "max_tokens": FEW if is_short else TOKENS,
        }

    def theirs(self, name: str) -> list[Text]:
        result = self.results[name]
        assert "error" not in result, result["error"]
        return [Text(*parts) for parts in zip(result["tokens"], result["drafts"], result["accepted"], strict=True)]

    def ours(self, name: str) -> list[Text]:
        if name not in self.own:
            job, head = self.job(name), self.heads[name]
            self.own[name] = generated(self.target, head.head, job["prompts"], head.draft_tokens, job["max_tokens"])
        return self.own[name]


@pytest.fixture(scope="module")
def runs(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    target, tokenizer = load_smollm2()
    specheads.enable(target)
    prompts = [
        encode(tokenizer, [Prompt(name, "test", ({"role": "user", "content": PROMPTS[name]},))])["input_ids"][0].tolist()
        for name in ("chat", "letter")
    ]
    greedy = [text.tokens for text in generated(target, None, prompts, 0, TOKENS)]
    heads = heads_of(Maker(target, tmp_path_factory.mktemp("heads")), Texts(target, prompts, greedy))
    runs = Runs(target, prompts, heads)
    results = serve([runs.job(name) for name in (None, *runs.heads)])
    runs.plain = results[0]["tokens"]
    runs.results = dict(zip(runs.heads, results[1:], strict=True))
    assert runs.plain == greedy
    return runs


def heads_of(make: Maker, texts: Texts) -> dict[str, Served]:
    """All heads that are served, by name."""
    learnt = learn_eagle(make.target, texts, steps=26, draft_tokens=texts.vocabulary(2048))
    # It learns fast, so it is given one of the texts only.
    first = learn_eagle(make.target, texts.first(), steps=5, version=1, fc_bias=False)
    heads = {
        "eagle3": make.saved("eagle3", learnt, "eagle3"),
        "eagle1": make.saved("eagle1", first, "eagle", format="eagle"),
        "medusa": make.saved("medusa", learn_medusa(make.target, texts, steps=6, num_heads=3), "medusa"),
    }
    heads["eagle3-shifted"] = make.changed("eagle3-shifted", heads["eagle3"], shift_layers)
    heads["eagle3-incomplete"] = make.changed(
        "eagle3-incomplete", heads["eagle3"], lambda _, weights: weights.pop("norm.weight")
    )
    heads["eagle3-exported"] = make.saved("eagle3-exported", learnt, "eagle3", format="eagle3")
    heads |= {name: make.saved(name, make.eagle(**fields), "eagle3") for name, fields in VARIANTS.items()}
    heads |= {name: make.saved(name, make.medusa(**fields), "medusa") for name, fields in MEDUSA.items()}
    heads["medusa-exported"] = make.saved("medusa-exported", make.medusa(), "medusa", format="medusa")
    heads["medusa-too-few"] = make.saved("medusa-too-few", make.medusa(), "medusa", draft_tokens=4)
    for name, fields in EAGLE_1.items():
        head = make.eagle(version=1, **fields)
        heads[name] = make.saved(name, head, "eagle", format=None if name == "eagle1-saved" else "eagle")
    for name, old, new in (
        ("eagle3", "norm.weight", "last.weight"),
        ("medusa", "blocks.1.layers.0.weight", "blocks.1.block.0.weight"),
    ):
        heads[f"{name}-renamed"] = make.changed(f"{name}-renamed", heads[name], partial(rename, old=old, new=new))
    return heads


def shift_layers(config: dict[str, Any], weights: dict[str, Any]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]


def rename(config: dict[str, Any], weights: dict[str, Any], old: str, new: str) -> None:
    weights[new] = weights.pop(old)


@pytest.mark.parametrize("name", LEARNT)
def test_acceptance_is_ours(name: str, runs: Runs) -> None:
    ours, theirs, size = runs.ours(name), runs.theirs(name), runs.heads[name].draft_tokens
    own, other = acceptance(ours, size), acceptance(theirs, size)
    print(name, own, other, runs.results[name]["accepted_per_position"], [len(text.accepted) for text in theirs])
    assert [text.tokens for text in ours] == [text.tokens for text in theirs] == runs.plain
    assert drafted_alike(ours, theirs, size) >= ALIKE
    assert min(own) > 0 and max(own) < 0.95, "the comparison would tell nothing"
    assert other == pytest.approx(own, abs=SHARE)


@pytest.mark.parametrize("name", LEARNT)
def test_the_engines_counters_are_of_its_rounds(name: str, runs: Runs) -> None:
    counts = [accepted for text in runs.theirs(name) for accepted in text.accepted]
    expected = [sum(count > position for count in counts) for position in range(runs.heads[name].draft_tokens)]
    assert runs.results[name]["accepted_per_position"] == expected


@pytest.mark.parametrize("name", SERVED)
def test_what_a_head_can_have_is_served(name: str, runs: Runs) -> None:
    ours, theirs, size = runs.ours(name), runs.theirs(name), runs.heads[name].draft_tokens
    assert [text.tokens for text in ours] == [text.tokens for text in theirs] == [runs.plain[0][:FEW]]
    assert drafted_alike(ours, theirs, size) >= ALIKE


@pytest.mark.parametrize("name", [*LEARNT, *SERVED])
def test_no_weight_is_ignored(name: str, runs: Runs) -> None:
    result = runs.results[name]
    assert result["file_only"] == []
    assert result["engine_only"] == (UNUSED if name == "two-layers" else [])


def test_feature_layers_that_are_one_too_many_are_noticed(runs: Runs) -> None:
    ours, theirs = runs.ours("eagle3"), runs.theirs("eagle3-shifted")
    own, other = acceptance(ours, 3), acceptance(theirs, 3)
    print("eagle3-shifted", own, other, drafted_alike(ours, theirs, 3))
    assert [text.tokens for text in theirs] == runs.plain
    assert drafted_alike(ours, theirs, 3) < ALIKE
    assert sum(other) < sum(own)
    assert other != pytest.approx(own, abs=SHARE)


@pytest.mark.parametrize("name", IGNORED)
def test_what_is_ignored_is_noticed(name: str, runs: Runs) -> None:
    assert runs.results[name]["file_only"] == IGNORED[name]
    theirs = runs.theirs(name)
    assert [text.tokens for text in theirs] == [runs.plain[0][:FEW]]
    assert drafted_alike(runs.ours(name), theirs, runs.heads[name].draft_tokens) < ALIKE


def test_a_weight_that_is_not_in_the_file_is_noticed(runs: Runs) -> None:
    assert runs.results["eagle3-incomplete"]["engine_only"] == ["norm.weight"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_refuses(name: str, runs: Runs) -> None:
    print(runs.results[name])
    assert re.search(REFUSED[name], runs.results[name]["error"])
