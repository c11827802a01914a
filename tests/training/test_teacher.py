"""The teacher's states and laws are the target's own, for every family, padded or packed; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specheads import EagleHead
from specheads.training import DraftTraining, Sampling, Teacher, TrainingBatch, TrainingSettings
from specheads.training.laws import TargetLaws

from ..tiny import FAMILIES, tiny
from .tools import batch_of, new_head, packed, random_texts, training_of

CHANGES = {
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 5.0},
}
PADDED = ["llama", "qwen3", "gemma2", "gemma3_text", "cohere", "granite", "gpt2", "opt", "bloom", "mpt", "qwen3_next"]
PACKED = ["llama", "qwen2", "mistral", "gemma3_text", "cohere", "gpt2", "gpt_neox", "falcon", "phi"]
# Longer than the windows of families that have one.
TEXTS, PROMPTS = random_texts(3, longest=24)


def target_of(family: str) -> Any:
    target = tiny(family, **CHANGES.get(family, {}))
    # The fast path of experts has no double precision.
    return target.float() if "experts" in str(target) else target


@torch.no_grad()
def alone(target: Any, text: list[int]) -> tuple[Tensor, Tensor]:
    """A text's hidden states and logits by itself."""
    output = target(torch.tensor([text]), output_hidden_states=True)
    return torch.cat(output.hidden_states, dim=-1)[0], output.logits[0]


def assert_same_as_alone(target: Any, batch: TrainingBatch, places: list[tuple[int, int]]) -> None:
    layers = range(target.config.get_text_config().num_hidden_layers + 1)
    teacher = Teacher(target, layers)
    states = teacher(batch)
    for text, (row, start) in zip(TEXTS, places, strict=True):
        features, logits = alone(target, text)
        own = slice(start, start + len(text))
        torch.testing.assert_close(states.features[row, own], features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(teacher.logits(states.last_hidden[row, own]), logits, rtol=1e-4, atol=1e-4)
    assert states.features.isfinite().all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "left"), [*((family, False) for family in PADDED), *((family, True) for family in PACKED)])
def test_padded_rows(family: str, left: bool) -> None:
    width = max(map(len, TEXTS)) + 2
    starts = [width - len(text) if left else 0 for text in TEXTS]
    assert_same_as_alone(target_of(family), batch_of(TEXTS, PROMPTS, width, left), list(enumerate(starts)))


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows(family: str) -> None:
    starts = [sum(map(len, TEXTS[:index])) for index in range(len(TEXTS))]
    assert_same_as_alone(target_of(family), packed(TEXTS, PROMPTS, padding=2), [(0, start) for start in starts])


@pytest.mark.parametrize("family", ["bloom", "mpt", "qwen3_next"])
def test_families_that_make_their_own_masks_are_not_packed(family: str) -> None:
    for batch in (packed(TEXTS, PROMPTS), batch_of(TEXTS, PROMPTS, left=True)):
        with pytest.raises(ValueError, match="train without packing, and pad on the right"):
            Teacher(target_of(family))(batch)


def test_targets_with_an_encoder_are_refused() -> None:
    with pytest.raises(ValueError, match="decoder-only"):
        Teacher(tiny("t5"))


def test_an_output_layer_that_is_not_all_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    original = type(target).forward

    def forward(model: Any, *arguments: Any, **named: Any) -> Any:
        output = original(model, *arguments, **named)
        output.logits = output.logits * 1.1
        return output

    monkeypatch.setattr(type(target), "forward", forward)
    with pytest.raises(ValueError, match="are not those of its output layer"):
        Teacher(target)(batch_of(TEXTS, PROMPTS))


def test_the_target_stays_as_it_is() -> None:
    target = tiny("llama")
    training = training_of(new_head(target, "eagle 3"), target)
    training(batch_of(TEXTS, PROMPTS)).loss_sum.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(parameter.grad is not None for parameter in training.parameters())
    assert not set(map(id, target.parameters())) & set(map(id, training.parameters()))


def broken(target: Any, row: int) -> TrainingBatch:
    """A batch of which one text has a token whose embedding is not a number."""
    batch = batch_of(TEXTS, PROMPTS)
    batch.input_ids[batch.input_ids == 29] = 28
    batch.input_ids[row, 3] = 29
    with torch.no_grad():
        target.get_input_embeddings().weight[29] = torch.nan
    return batch


@pytest.mark.filterwarnings("ignore:The head was made for")
@pytest.mark.parametrize("name", ["eagle 3", "medusa"])
def test_texts_with_states_that_are_not_finite_are_skipped_and_counted(name: str) -> None:
    target = tiny("llama", tie_word_embeddings=False)
    head = new_head(target, name, **({"own_embeddings": True} if name == "eagle 3" else {}))
    batch = broken(target, 1)
    teacher = Teacher(target, head.config.feature_layers)
    training = DraftTraining(head, teacher, TrainingSettings(3))
    output = training(batch)
    output.loss_sum.backward()
    assert (teacher.rows_seen, teacher.rows_skipped) == (3, 1)
    assert all(parameter.grad.isfinite().all() for parameter in head.parameters() if parameter.grad is not None)
    others = batch_of([TEXTS[0], TEXTS[2]], [PROMPTS[0], PROMPTS[2]])
    others.input_ids[others.input_ids == 29] = 28
    torch.testing.assert_close(output.loss_sum, training(others).loss_sum)
    with pytest.raises(FloatingPointError, match=r"2 of 8 texts .* more than 1.0%"):
        training(batch)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), Sampling(0.7, 5, 0.8)])
def test_the_law_is_the_one_that_generate_samples_from(sampling: Sampling) -> None:
    target = tiny("llama")
    output = target.generate(
        torch.tensor([TEXTS[0]]), do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        max_new_tokens=1, output_scores=True, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    teacher = Teacher(target)
    last = teacher(batch_of(TEXTS[:1], PROMPTS[:1])).last_hidden[:, -1]
    laws = TargetLaws.of(sampling.warp(teacher.logits(last)), None)
    torch.testing.assert_close(laws.probs, output.scores[0].double().softmax(-1), rtol=1e-5, atol=1e-6)


def test_the_head_must_fit_the_teacher() -> None:
    target = tiny("llama")
    head = EagleHead.from_target(target)
    with pytest.raises(ValueError, match=r"The head reads the layers \[0, 1\]"):
        DraftTraining(head, Teacher(target), TrainingSettings(3))
    with pytest.raises(TypeError, match="Linear are not trained here"):
        DraftTraining(torch.nn.Linear(1, 1), Teacher(target), TrainingSettings(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 heads draft that many tokens, and the training is to go 4 deep"):
        training_of(new_head(target, "medusa"), target, depth=4)


@pytest.mark.parametrize(
    "settings",
    [{"depth": 0}, {"chunk_roots": 0}, {"on_policy": 2}, {"feature_noise": -1}, {"sampling": Sampling(temperature=0)}],
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|no law to learn"):
        TrainingSettings(**{"depth": 2, **settings})


def test_noise_on_features_is_for_training_only() -> None:
    target = tiny("llama")
    training = training_of(new_head(target, "eagle 1"), target, feature_noise=0.1)
    batch = batch_of(TEXTS, PROMPTS)
    first, second = (training(batch).loss_sum.detach() for _ in range(2))
    assert not torch.equal(first, second)
    training.eval()
    assert torch.equal(training(batch).loss_sum, training(batch).loss_sum)


def test_every_family_named_here_exists() -> None:
    assert {*PADDED, *PACKED} <= set(FAMILIES)
