"""What `generate` promises besides its law: arguments, stop rules, streaming, statistics, refusals."""

from __future__ import annotations

import copy
import pickle
import string
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import specheads
from specheads import SpeculativeConfig, SpeculativeGenerationMixin

from .exactness.test_greedy import prompt
from .tiny import perturbed, tiny

TOKENS = 20
LETTERS = string.ascii_letters[:32]
DRAFT = {"draft_tokens": 4, "adaptive": False}


def both(
    target: Any, inputs: dict[str, Tensor], speculative: Any = None, draft: Any = None, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Greedy tokens of the plain and of the speculative `generate`."""
    settings = {"max_new_tokens": TOKENS, "do_sample": False, **arguments}
    plain = target.generate(**inputs, **settings)
    return plain, target.generate(**inputs, **settings, speculative=speculative or DRAFT, assistant_model=draft)


GREEDY_ARGUMENTS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[31], [5, 8]]},
    "sequence_bias": {"sequence_bias": [[[7], 2.0], [[5, 9], -4.0]]},
    "min_length": {"min_length": 18, "eos_token_id": [2, 31, 8]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [2, 31, 8]},
    "forced_eos_token_id": {"forced_eos_token_id": 6},
    "suppress_tokens": {"suppress_tokens": [31, 5, 4]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [31, 5, 4, 12, 6]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.4)},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "guidance": {"guidance_scale": 1.8},
    "several ends": {"eos_token_id": [5, 31, 12]},
    "no ends": {"eos_token_id": None},
    "no padding token": {"eos_token_id": None, "pad_token_id": None},
    "max_length": {"max_new_tokens": None, "max_length": 21},
    "one token": {"max_new_tokens": 1},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [(ids[-1] * 3 + row + k) % 32 for k in range(9)]},
}


@pytest.mark.parametrize("drafter", ["draft model", "auto"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", GREEDY_ARGUMENTS)
def test_arguments_change_nothing_but_the_passes(name: str, batch: int, drafter: str, target: Any, draft: Any) -> None:
    plain, speculative = both(
        target,
        prompt("llama", batch),
        {**DRAFT, "drafter": "auto", "tree_nodes": 8},
        draft if drafter == "draft model" else None,
        **GREEDY_ARGUMENTS[name],
    )
    assert torch.equal(plain, speculative)


def test_num_return_sequences(target: Any, draft: Any) -> None:
    inputs = prompt("llama", 2)
    arguments = {"num_return_sequences": 3, "do_sample": True, "top_k": 1, "repetition_penalty": 1.4, "max_new_tokens": TOKENS}
    plain = target.generate(**inputs, **arguments)
    assert torch.equal(plain, target.generate(**inputs, **arguments, speculative=DRAFT, assistant_model=draft))


def test_prefix_functions_see_their_row_with_return_sequences(target: Any) -> None:
    asked: list[set[int]] = [set(), set()]

    def allowed_by(turn: int) -> Any:
        def allowed(row: int, ids: Tensor) -> list[int]:
            asked[turn].add(row)
            return [3 + row] if int(ids.shape[0]) % 2 else [20 + row]

        return allowed

    arguments = {**prompt("llama", 2), "num_return_sequences": 2, "do_sample": True, "max_new_tokens": 6}
    plain = target.generate(**arguments, prefix_allowed_tokens_fn=allowed_by(0))
    ours = target.generate(**arguments, prefix_allowed_tokens_fn=allowed_by(1), speculative={"drafter": "suffix"})
    assert torch.equal(plain, ours)
    assert asked[0] == asked[1] and len(asked[0]) > 1


class StopOnLast(StoppingCriteria):
    """Stops each row at some tokens, and counts what it was asked."""

    def __init__(self, *tokens: int):
        self.tokens = torch.tensor(tokens)
        self.widths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.widths.append(input_ids.shape[1])
        return torch.isin(input_ids[:, -1], self.tokens)


class StopAll(StoppingCriteria):
    """The old style: one answer for the whole batch."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return bool((input_ids[0, -1] == 12) or input_ids.shape[1] > 24)


@pytest.mark.parametrize("batch", [1, 4])
def test_own_stop_rules_are_asked_once_a_token(batch: int, target: Any, draft: Any) -> None:
    inputs = prompt("llama", batch)
    for token in range(3, 32, 4):
        rules = [StopOnLast(token, 31), StopOnLast(token, 31)]
        plain = target.generate(
            **inputs, max_new_tokens=TOKENS, do_sample=False, stopping_criteria=StoppingCriteriaList([rules[0]])
        )
        ours = target.generate(
            **inputs, max_new_tokens=TOKENS, do_sample=False, stopping_criteria=StoppingCriteriaList([rules[1]]),
            speculative=DRAFT, assistant_model=draft,
        )  # fmt: skip
        assert torch.equal(plain, ours)
        assert rules[0].widths == rules[1].widths


def test_a_rule_that_answers_for_the_whole_batch(target: Any, draft: Any) -> None:
    plain, ours = both(target, prompt("llama", 4), draft=draft, stopping_criteria=StoppingCriteriaList([StopAll()]))
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("batch", [1, 4])
def test_any_token_may_be_the_end(batch: int, target: Any, draft: Any) -> None:
    """The end at every place of a block, in every row: nothing comes after it, in the streamer neither."""
    inputs = prompt("llama", batch)
    free = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    for token in set(free[:, 11:].flatten().tolist()):
        streamer = Recorder()
        plain = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=token, pad_token_id=0)
        ours = target.generate(
            **inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=token, pad_token_id=0, speculative=DRAFT,
            assistant_model=draft, streamer=streamer,
        )  # fmt: skip
        assert torch.equal(plain, ours)
        assert torch.equal(streamer.text(), ours)
        assert streamer.ended


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.parts.append(value)

    def end(self) -> None:
        self.ended = True

    def text(self) -> Tensor:
        return torch.cat([self.parts[0], *(part[:, None] for part in self.parts[1:])], dim=1)


@pytest.mark.parametrize("batch", [1, 4])
def test_streamers_get_what_plain_ones_get(batch: int, target: Any, draft: Any) -> None:
    plain, ours = Recorder(), Recorder()
    inputs = prompt("llama", batch)
    target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, streamer=plain)
    target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, streamer=ours, speculative=DRAFT, assistant_model=draft)
    assert len(plain.parts) == len(ours.parts)
    assert all(torch.equal(one, other) for one, other in zip(plain.parts, ours.parts, strict=True))


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of one letter per token."""
    tokenizer = Tokenizer(BPE({LETTERS[i]: i for i in range(32)}, [], unk_token="a"))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_text_iterator_streamer_in_a_thread(target: Any, draft: Any) -> None:
    streamer = TextIteratorStreamer(letters(), skip_prompt=True, timeout=30)
    inputs = prompt("llama", 1)
    settings = {**inputs, "max_new_tokens": TOKENS, "do_sample": False, "speculative": DRAFT, "assistant_model": draft}
    thread = threading.Thread(target=target.generate, kwargs={**settings, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == letters().decode(target.generate(**settings)[0, 11:])


@pytest.mark.parametrize("batch", [1, 4])
def test_stop_strings(batch: int, target: Any, draft: Any) -> None:
    inputs = prompt("llama", batch)
    free = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    stopped = 0
    for place in range(12, 24, 3):
        ending = "".join(LETTERS[token] for token in free[0, place : place + 2].tolist())
        plain, ours = both(target, inputs, draft=draft, stop_strings=[ending], tokenizer=letters())
        assert torch.equal(plain, ours)
        stopped += plain.shape[1] < free.shape[1]
    assert stopped or batch > 1


@pytest.mark.parametrize("drafter", ["auto", "draft model"])
def test_without_an_end_token_rows_go_on_until_the_last_one_stops(drafter: str) -> None:
    """So plain `generate` does it: rows that a rule has stopped are not padded, but continued."""
    target = specheads.enable(tiny(eos_token_id=None, pad_token_id=None))
    inputs = {"input_ids": torch.randint(3, 12, (4, 11), generator=torch.Generator().manual_seed(5))}
    free = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    endings = [
        "".join(LETTERS[token] for token in row[place : place + 2].tolist())
        for row, place in zip(free, (13, 17, 20, 19), strict=True)
    ]
    draft = perturbed(target, 0.05) if drafter == "draft model" else None
    plain, ours = both(target, inputs, draft=draft, stop_strings=endings, tokenizer=letters())
    assert torch.equal(plain, ours) and 13 < plain.shape[1] < free.shape[1]


def test_max_time_stops(target: Any) -> None:
    out = target.generate(**prompt("llama", 1), max_new_tokens=200, eos_token_id=None, max_time=0.0, speculative=True)
    assert out.shape[1] == 12


class Counting(LogitsProcessor):
    """Favours a token by how often it was called: state that must not see drafts."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(tuple(input_ids.shape))
        scores = scores.clone()
        scores[:, 3 + len(self.calls) % 7] += 1.5
        return scores


@pytest.mark.parametrize("batch", [1, 4])
def test_a_processor_with_a_state_sees_what_plain_decoding_shows_it(batch: int, target: Any, draft: Any) -> None:
    inputs = prompt("llama", batch)
    processors = [Counting(), Counting()]
    arguments = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": 9}
    plain = target.generate(**inputs, **arguments, logits_processor=LogitsProcessorList([processors[0]]))
    out = target.generate(
        **inputs, **arguments, logits_processor=LogitsProcessorList([processors[1]]), speculative=DRAFT, assistant_model=draft,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(plain, out.sequences)
    assert processors[0].calls == processors[1].calls
    assert out.speculation.num_accepted_draft_tokens > 0


def test_ratios_over_a_processor_with_a_state_are_refused(target: Any, draft: Any) -> None:
    with pytest.raises(ValueError, match="Counting may keep a state"):
        target.generate(
            **prompt("llama", 1), do_sample=True, logits_processor=LogitsProcessorList([Counting()]),
            speculative={"verification": "block"}, assistant_model=draft,
        )  # fmt: skip


def test_statistics_add_up(target: Any, draft: Any) -> None:
    out = target.generate(
        **prompt("llama", 4), max_new_tokens=TOKENS, do_sample=False, speculative={**DRAFT, "per_step": True},
        assistant_model=draft, return_dict_in_generate=True,
    )  # fmt: skip
    pooled = out.speculation
    lengths = [int((line[11:] != 0).sum()) for line in out.sequences]
    assert [row.num_emitted_tokens for row in pooled.rows] == lengths
    assert pooled.num_emitted_tokens == sum(lengths)
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert getattr(pooled, name) == sum(getattr(row, name) for row in pooled.rows)
    for row in pooled.rows:
        assert sum(row.acceptance_histogram) == row.num_spec_steps == len(row.per_step_accepted)
        assert sum(i * n for i, n in enumerate(row.acceptance_histogram)) == row.num_accepted_draft_tokens
        assert sum(row.per_step_drafted) == row.num_draft_tokens
        assert row.mean_acceptance_length == row.num_emitted_tokens / row.num_spec_steps
    product = 1.0
    for joint, conditional in zip(pooled.acceptance_at_position, pooled.conditional_acceptance_at_position, strict=True):
        product *= conditional
        assert 0 <= joint <= conditional <= 1
    assert set(pooled.seconds) == {"draft", "verify", "other"}
    assert all(value >= 0 for value in pooled.seconds.values())


@pytest.mark.parametrize("shape", [DRAFT, {"drafter": "auto", "tree_nodes": 6, "adaptive": False}])
def test_drafts_are_kept_and_shown_as_they_were(target: Any, draft: Any, shape: dict[str, Any]) -> None:
    shown: list[dict[int, Any]] = []

    class Show(BaseStreamer):
        def put(self, value: Any) -> None:
            pass

        def put_round(self, rounds: Any) -> None:
            shown.append(dict(rounds))

        def end(self) -> None:
            pass

    given = prompt("llama", 3)
    arguments = {"assistant_model": draft} if shape is DRAFT else {}
    out = target.generate(
        **given, **arguments, max_new_tokens=TOKENS, do_sample=False, return_dict_in_generate=True, streamer=Show(),
        speculative={**shape, "per_step": True, "per_step_drafts": True},
    )  # fmt: skip
    for row, stats in enumerate(out.speculation.rows):
        rounds = stats.per_step_drafts
        assert [a_round[row] for a_round in shown if row in a_round] == rounds
        assert [len(a_round.tokens) for a_round in rounds] == stats.per_step_drafted
        assert [len(a_round.accepted) for a_round in rounds] == stats.per_step_accepted
        emitted = [token for a_round in rounds for token in a_round.emitted]
        assert emitted == out.sequences[row, given["input_ids"].shape[1] :][: len(emitted)].tolist()
        for a_round in rounds:
            path = [0, *a_round.accepted]
            assert [a_round.parents[node - 1] for node in path[1:]] == path[:-1]
            assert [a_round.tokens[node - 1] for node in path[1:]] == a_round.emitted[: len(path) - 1]
    assert any(a_round.accepted for a_round in rounds) and any(
        len(a_round.accepted) < len(a_round.tokens) for a_round in rounds
    )


def test_a_draft_equal_to_the_target_is_always_accepted(target: Any) -> None:
    for settings in ({}, {"verification": "token"}):
        out = target.generate(
            **prompt("llama", 4), max_new_tokens=21, do_sample=True, eos_token_id=None, return_dict_in_generate=True,
            speculative={**DRAFT, **settings}, assistant_model=copy.deepcopy(specheads.disable(tiny())),
        )  # fmt: skip
        assert out.speculation.conditional_acceptance_at_position == [1.0] * 4
        assert out.speculation.num_spec_steps == 4 * 5


def test_identical_calls_give_identical_results(target: Any, draft: Any) -> None:
    specheads.enable(target, drafter=draft, seed=5, tree_nodes=8)
    outs = [target.generate(**prompt("llama", 4), do_sample=True, max_new_tokens=TOKENS, speculative=True) for _ in range(2)]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"speculative": {"draft_token": 3}}, "draft_token"),
        ({"speculative": {"verification": "exact"}}, "verification"),
        ({"speculative": {"drafter": "nothing"}}, "nothing"),
        ({"speculative": {"sampling_noise": "keyed"}}, "seed"),
        ({"speculative": {"seed": [1, 2, 3]}, "do_sample": True}, "3 seeds"),
        ({"cache_implementation": "static"}, "cache"),
    ],
)
def test_refusals_say_why_and_leave_the_model_as_it_was(arguments: dict[str, Any], message: str, target: Any) -> None:
    inputs = prompt("llama", 1)
    before = dict(target.__dict__)
    with pytest.raises(ValueError, match=message):
        target.generate(**{"speculative": True, "max_new_tokens": 5, **inputs, **arguments})
    assert target.__dict__ == before
    plain, ours = both(target, inputs)
    assert torch.equal(plain, ours)


def test_a_call_that_fails_leaves_no_trace(target: Any, draft: Any) -> None:
    specheads.enable(target, drafter=draft)

    class Failing(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if input_ids.shape[1] > 15:
                raise RuntimeError("stop here")
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    inputs = prompt("llama", 2)
    expected = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, speculative=True)
    before = dict(target._speculation.drafter.__dict__)
    with pytest.raises(RuntimeError, match="stop here"):
        target.generate(**inputs, max_new_tokens=TOKENS, speculative=True, stopping_criteria=StoppingCriteriaList([Failing()]))
    assert target._speculation.drafter.__dict__ == before
    assert torch.equal(expected, target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, speculative=True))


def test_scores_that_are_no_law_are_an_error(target: Any) -> None:
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, -torch.inf)

    with pytest.raises(ValueError, match="no token to sample"):
        target.generate(
            **prompt("llama", 1),
            do_sample=True,
            speculative=True,
            logits_processor=LogitsProcessorList([Nothing()]),
            max_new_tokens=3,
        )


def test_a_draft_model_that_overflows_harms_nothing(target: Any) -> None:
    broken = perturbed(target, 0.0)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    inputs = prompt("llama", 2)
    plain, ours = both(target, inputs, draft=broken)
    assert torch.equal(plain, ours)
    out = target.generate(
        **inputs, do_sample=True, max_new_tokens=8, speculative={**DRAFT, "tree_nodes": 8}, assistant_model=broken
    )
    assert out.shape[1] <= 19 and bool((out >= 0).all() and (out < 32).all())


def test_draft_models_of_other_sizes(target: Any) -> None:
    wide = perturbed(tiny(vocab_size=40), 0.1)
    inputs = prompt("llama", 2)
    with pytest.raises(ValueError, match="vocabulary of 40"):
        target.generate(**inputs, speculative=DRAFT, assistant_model=wide)
    for other in (wide, perturbed(tiny(vocab_size=24), 0.1)):
        plain, ours = both(target, inputs, draft=other, tokenizer=letters(), assistant_tokenizer=letters())
        assert torch.equal(plain, ours)
    t5 = tiny("t5")
    with pytest.raises(ValueError, match="encoder-decoder"):
        target.generate(**inputs, speculative=DRAFT, assistant_model=t5)


def test_a_draft_model_with_less_room(target: Any) -> None:
    short = tiny("gpt2", max_position_embeddings=20)
    for batch in (1, 4):
        plain, ours = both(target, prompt("llama", batch), draft=short)
        assert torch.equal(plain, ours)


def test_positions_are_never_beyond_the_models(draft: Any) -> None:
    target = specheads.enable(tiny("gpt2", max_position_embeddings=31))
    for drafter in ("auto", "suffix"):
        plain, ours = both(target, prompt("gpt2", 4), {**DRAFT, "draft_tokens": 8, "drafter": drafter, "tree_nodes": 9})
        assert torch.equal(plain, ours)


def test_enable_keeps_what_the_model_is(target: Any) -> None:
    fresh = tiny()
    cls = type(fresh)
    assert specheads.enable(fresh) is fresh
    assert isinstance(fresh, LlamaForCausalLM) and isinstance(fresh, SpeculativeGenerationMixin)
    assert type(fresh).__name__ == "LlamaForCausalLM"
    assert specheads.disable(fresh) is fresh and type(fresh) is cls
    assert "_speculation" not in fresh.__dict__


def test_a_draft_model_is_not_part_of_the_target(target: Any, draft: Any, tmp_path: Any) -> None:
    names = set(target.state_dict())
    specheads.enable(target, drafter=draft)
    assert set(target.state_dict()) == names
    target.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]


def test_copies_and_pickles(target: Any, draft: Any) -> None:
    specheads.enable(target, drafter=draft, draft_tokens=3)
    inputs = prompt("llama", 2)
    expected = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, speculative=True)
    for other in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert isinstance(other, LlamaForCausalLM) and other._speculation.config.draft_tokens == 3
        assert torch.equal(expected, other.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, speculative=True))


def test_a_bound_generate_is_refused() -> None:
    model = tiny()
    model.generate = lambda *arguments, **keywords: None
    with pytest.raises(ValueError, match="own `generate`"):
        specheads.enable(model)


def test_as_a_base_class() -> None:
    class Mine(SpeculativeGenerationMixin, LlamaForCausalLM):
        pass

    model = Mine(tiny().config).eval().double()
    plain, ours = both(model, prompt("llama", 2))
    assert torch.equal(plain, ours)


def test_settings_of_a_generation_config_are_saved_and_loaded(tmp_path: Path) -> None:
    model = specheads.enable(tiny().float())
    model.generation_config = GenerationConfig.from_model_config(model.config)  # which every fresh model has
    model.generation_config.speculative = {"drafter": "lookup", "draft_tokens": 3}
    model.save_pretrained(tmp_path)
    again = specheads.enable(LlamaForCausalLM.from_pretrained(tmp_path))
    assert again.generation_config.speculative == {"drafter": "lookup", "draft_tokens": 3}
    assert "speculation" in again.generate(**prompt("llama", 1), max_new_tokens=4, return_dict_in_generate=True).__dict__


def test_settings_as_a_config_and_generation_config_objects(target: Any) -> None:
    inputs = prompt("llama", 2)
    expected = target.generate(**inputs, max_new_tokens=9, do_sample=False)
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=2, pad_token_id=0)
    assert torch.equal(
        expected, target.generate(**inputs, generation_config=config, speculative=SpeculativeConfig(drafter="suffix"))
    )
    with pytest.raises(TypeError, match="speculative"):
        target.generate(**inputs, speculative=3)


def test_threads_and_nested_calls_do_not_mix(target: Any, draft: Any) -> None:
    specheads.enable(target, drafter=draft)
    inputs = prompt("llama", 2)
    expected = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    results: dict[int, Tensor] = {}

    def work(number: int) -> None:
        for _ in range(3):
            results[number] = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, speculative=bool(number % 2))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result in results.values())

    class Nested(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            inner = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=2, do_sample=False)
            scores = scores.clone()
            scores[torch.arange(len(inner)), inner[:, -1]] += 1.0
            return scores

    plain, ours = both(target, inputs, logits_processor=LogitsProcessorList([Nested()]))
    assert torch.equal(plain, ours)


def test_importing_costs_little() -> None:
    import subprocess
    import sys

    script = "import sys, specheads; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
