"""What can be named to be measured: how names are read, which drafters they stand for, and that each of them runs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.early_exit import EarlyExitDrafter
from specheads.drafters.other_vocabulary import OtherVocabularyDrafter
from specheads.drafters.retrieval import RetrievalDrafter
from specheads.drafters.retrieval_store import build_store
from specheads.drafters.staged import StagedDrafter
from specheads.drafters.token_tree import TokenTreeDrafter
from specheads.drafters.with_suffix import WithSuffix
from specheads.evaluation import acceptance, exactness, speed
from specheads.evaluation.bench import load_draft
from specheads.evaluation.loading import generate_arguments, load_drafters
from specheads.evaluation.prompts import InputError
from specheads.evaluation.report.words import short_name
from specheads.evaluation.variants import Variant, check_batch_size, parse_speculative, parse_variants

from ..drafters.vocabularies import byte_level
from ..exactness.head_loop import random_head


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    folder = tmp_path_factory.mktemp("head")
    random_head(model, "medusa").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("store")
    texts = ["abcabcabc", "one two one two", "[assistant] abc"]
    build_store(folder, [tokenizer(text).input_ids for text in texts], tokenizer)
    return folder


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    """A model with a tokenizer of its own, of whose tokens some are the target's."""
    tokenizer = byte_level(300)
    config = copy.deepcopy(model.config)
    config.vocab_size = len(tokenizer)
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("other")
    type(model)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def one(name: str) -> Variant:
    return parse_speculative(name)[0]


def nothing_to_load(name: str) -> tuple[Any, Any]:
    return name.upper(), None


# Names


def test_plain_comes_first_named_or_not() -> None:
    assert [variant.name for variant in parse_variants("auto, plain,hf-lookup")] == ["plain", "auto", "hf-lookup"]
    assert [variant.name for variant in parse_variants("none")] == ["plain", "none"]


def test_what_stands_in_a_name() -> None:
    found = {variant.name: variant for variant in parse_variants("hf-lookup:7+packed,tree:a+b@6+packed,early-exit:3,suffix@9")}
    assert found["hf-lookup:7+packed"] == Variant("hf-lookup:7+packed", "hf-lookup", "7", is_packed=True)
    assert found["tree:a+b@6+packed"] == Variant("tree:a+b@6+packed", "tree", "a+b", 6, is_packed=True)
    assert found["early-exit:3"] == Variant("early-exit:3", "early-exit", "3")
    assert found["suffix@9"] == Variant("suffix@9", "suffix", tree_nodes=9)


def test_a_draft_model_may_have_colons_and_marks_in_its_name() -> None:
    assert one("assisted:some/where:else").argument == "some/where:else"
    assert one("assisted:c++/me@home@3") == Variant("assisted:c++/me@home@3", "assisted", "c++/me@home", 3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("plain,turbo", "no variant turbo; there are plain"),
        ("assisted", "needs a draft model: write assisted:<folder or id>"),
        ("retrieval:", "needs a datastore: write retrieval:<folder>"),
        ("tree:a+", "needs a draft model, or several: write tree:<folder or id>"),
        ("mtp:2", "no variant mtp:2"),
        ("early-exit:first", "no variant early-exit:first"),
        ("plain@3", "plain@3 drafts no trees of a chosen size; drop @3"),
        ("suffix@0", "at least 1 node"),
    ],
)
def test_bad_variants_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse_variants(text)


def test_the_modes_of_others_take_no_batches() -> None:
    variants = parse_variants("auto,hf-lookup")
    check_batch_size(variants, 1)
    with pytest.raises(InputError, match="hf-lookup: drafts are for one prompt at a time there"):
        check_batch_size(variants, 2)


def test_a_legend_names_models_without_their_folders() -> None:
    assert short_name("assisted:some/where/draft") == "assisted:draft"
    assert short_name("tree:some/a+other/b@6") == "tree:a+b@6"
    assert short_name("head:some/eagle3+packed") == "head:eagle3+packed"
    assert short_name("head-alone:some/eagle3@16") == "head alone: eagle3@16"


def test_a_folder_that_is_just_called_head_keeps_the_one_above() -> None:
    assert short_name("head-alone:/some/toy/head with temperature 0.0") == "head alone: toy/head with temperature 0.0"
    assert short_name("head:toy/run/checkpoint-100/") == "head:run/checkpoint-100"
    assert short_name("head:head") == "head:head"


# What they stand for


def test_each_variant_has_its_arguments_of_generate() -> None:
    def arguments(name: str) -> dict[str, Any]:
        return generate_arguments(parse_variants(name)[1], {"draft_tokens": 3}, 3, None, nothing_to_load)

    assert arguments("suffix") == {"speculative": {"drafter": "suffix", "draft_tokens": 3}}
    assert arguments("suffix@5") == {"speculative": {"drafter": "suffix", "draft_tokens": 3, "tree_nodes": 5}}
    assert arguments("hf-lookup") == {"prompt_lookup_num_tokens": 3}
    assert arguments("hf-lookup:7") == {"prompt_lookup_num_tokens": 7}
    assert arguments("assisted:draft") == {"speculative": {"draft_tokens": 3}}  # the draft model is attached
    with pytest.raises(InputError, match="write tree:a@<nodes>, or give --tree-nodes"):
        arguments("tree:a")


def test_another_tokenizer_is_told_to_transformers_too(model_folder: Path, other_folder: Path, tokenizer: Any) -> None:
    def arguments(folder: Path) -> set[str]:
        variant = parse_variants(f"hf-assisted:{folder}")[1]
        return set(generate_arguments(variant, {}, 3, tokenizer, load_draft))

    assert arguments(other_folder) == {"assistant_model", "tokenizer", "assistant_tokenizer"}
    assert arguments(model_folder) == {"assistant_model"}


def test_each_variant_has_its_drafter(
    model: Any, tokenizer: Any, model_folder: Path, other_folder: Path, head_folder: Path, store: Path
) -> None:
    kinds = {
        f"assisted:{model_folder}": DraftModelDrafter,
        f"assisted:{other_folder}": OtherVocabularyDrafter,
        f"staged:{model_folder}": StagedDrafter,
        f"tree:{model_folder}@4": TokenTreeDrafter,
        f"tree:{model_folder}+{model_folder}@4": TokenTreeDrafter,
        f"retrieval:{store}": RetrievalDrafter,
        "early-exit": EarlyExitDrafter,
        "early-exit:1": EarlyExitDrafter,
        f"head:{head_folder}": WithSuffix,
    }
    named = parse_speculative(",".join([*kinds, "suffix", f"head-alone:{head_folder}"]))
    drafters = load_drafters(named, model, tokenizer, load_draft)
    assert {name: type(drafter) for name, drafter in drafters.items() if name in kinds} == kinds
    assert "suffix" not in drafters
    assert not isinstance(drafters[f"head-alone:{head_folder}"], WithSuffix)
    trees: list[Any] = [drafters[name] for name in kinds if name.startswith("tree")]
    assert [len(tree.models) for tree in trees] == [1, 2]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("head:/no/such/folder", "The head /no/such/folder cannot be used"),
        ("retrieval:/no/such/folder", "The drafter retrieval:/no/such/folder cannot be used"),
        ("mtp", "The drafter mtp cannot be used: .*multi-token-prediction"),
        ("early-exit:2", "takes from 1 to 1 of the 2 layers"),
        ("staged:OTHER", "The draft model .* does not fit: The draft model's tokenizer differs"),
        ("tree:OTHER+OTHER@3", "The draft models .* do not fit: The draft model's tokenizer differs"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, tokenizer: Any, other_folder: Path, name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_drafters([one(name.replace("OTHER", str(other_folder)))], model, tokenizer, load_draft)


# Running them


def all_of(model_folder: Path, other_folder: Path, store: Path) -> list[str]:
    from_models = [f"assisted:{model_folder}", f"assisted:{other_folder}", f"staged:{model_folder}", f"tree:{model_folder}@6"]
    return ["lookahead", "early-exit:1", f"retrieval:{store}", *from_models]


def test_acceptance_measures_every_drafter(
    model_folder: Path, other_folder: Path, store: Path, prompt_file: Path, tmp_path: Path
) -> None:
    names = all_of(model_folder, other_folder, store)
    output = tmp_path / "acceptance.json"
    line = ["--model", str(model_folder), "--prompts", str(prompt_file), "--output", str(output), "--max-new-tokens", "12"]
    given = ["--variant", ",".join(names), "--draft-tokens", "3", "--tree-nodes", "chain,4", "--temperatures", "0,1"]
    assert acceptance.main([*line, *given, "--turns", "1"]) == 0
    results = json.loads(output.read_text(encoding="utf-8"))["results"]
    sizes = {(result["variant"], result["tree_nodes"]) for result in results}
    assert sizes == {(name, nodes) for name in names[:-1] for nodes in (None, 4)} | {(names[-1], 6)}
    figures = {
        (entry["variant"], entry["temperature"]): entry["figures"] for entry in results if entry["tree_nodes"] in (None, 6)
    }
    for temperature in (0.0, 1.0):
        for name in (f"assisted:{model_folder}", f"staged:{model_folder}", f"tree:{model_folder}@6"):  # the target's own law
            assert figures[name, temperature]["acceptance_at_position"][0] == pytest.approx(1)
        for name in names:
            assert figures[name, temperature]["num_draft_tokens"] > 0


@pytest.mark.parametrize("way", [[], ["--temperature", "0.9"]])
def test_speed_measures_every_drafter(
    model_folder: Path, other_folder: Path, store: Path, prompt_file: Path, tmp_path: Path, way: list[str]
) -> None:
    names = [*all_of(model_folder, other_folder, store), f"early-exit:1+packed,hf-assisted:{other_folder}"]
    output = tmp_path / "speed.json"
    line = ["--model", str(model_folder), "--prompts", str(prompt_file), "--output", str(output), "--max-new-tokens", "12"]
    assert speed.main([*line, "--variant", ",".join(names), *way]) == 0
    summary = json.loads(output.read_text(encoding="utf-8"))["summary"]
    for name in ",".join(names).split(","):
        assert summary[name]["greedy"] == (None if way else {"rows": 3, "divergences": []})


def test_exactness_takes_a_number_of_nodes(model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "exactness.json"
    line = ["--model", str(model_folder), "--variant", f"tree:{model_folder}@3", "--samples", "40", "--tokens", "2"]
    more = ["--limit", "1", "--sampled-prompts", "1", "--max-new-tokens", "6", "--dtype", "float64", "--top-k", "3"]
    exactness.main([*line, *more, "--output", str(output)])
    result = json.loads(output.read_text(encoding="utf-8"))["results"][0]
    assert result["greedy"] == {"rows": 1, "identical": 1, "divergences": []}
    sampling = result["sampling"][0]
    assert sampling["num_draft_tokens"] > 40  # a chain has one node there: the text is of three tokens
