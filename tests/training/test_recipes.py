from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import specheads
from specheads.training.heads_command import main

from .runs import flags, write_chats

RECIPES = sorted((Path(__file__).parents[2] / "train" / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert {recipe.stem for recipe in RECIPES} == {"eagle1", "eagle3", "medusa1", "medusa2", "sequential"}


@pytest.mark.filterwarnings("ignore:The head .* goes with an adapter")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_trains_a_head_that_drafts_exactly(recipe: Path, target_folder: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 48)
    words = flags(target_folder, chats, tmp_path / "out", "max_steps", "4")
    # What a recipe is about stays as it says.
    own = {"--depth", "--learning_rate", "--save_strategy", *(["--draft_vocab_size"] if recipe.stem == "eagle1" else [])}
    left = [word for pair in zip(words[::2], words[1::2], strict=True) if pair[0] not in own for word in pair]
    smaller = ["--eval_examples", "4", "--generate_tokens", "4", "--eval_steps", "2", "--save_steps", "2"]
    assert main(["--config", str(recipe), *left, *smaller]) == 0
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float)
    specheads.enable(model, drafter=str(tmp_path / "out"), adaptive=False)
    greedy = {"max_new_tokens": 10, "do_sample": False}
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(model.generate(ids, speculative=True, **greedy), model.generate(ids, **greedy))
