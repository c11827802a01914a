"""Models of one's own: they work if they keep the usual forward, and are refused by name if not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

import specheads
from specheads import compat
from specheads.families import family_of

from .exactness.test_greedy import arguments, prompt
from .tiny import SHAPE, perturbed


class OwnConfig(PreTrainedConfig):
    model_type = "of_ones_own"

    def __init__(self, vocab_size: int = 32, hidden_size: int = 32, num_hidden_layers: int = 2, **kwargs: Any):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads = 4
        super().__init__(**{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **kwargs})


class OwnModel(PreTrainedModel, GenerationMixin):
    """A transformer from scratch with the usual forward; `habit` is what it does in another way."""

    config_class = OwnConfig
    _supports_sdpa = True
    habit = "usual"

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.places = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None, cache: Any = None,
        past_key_values: Any = None, use_cache: bool | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        cache = cache if past_key_values is None else past_key_values
        cache = DynamicCache() if cache is None else cache
        states = self.embed_tokens(input_ids)
        seen = cache.get_seq_length()
        if position_ids is None or self.habit == "counts columns":
            position_ids = torch.arange(seen, seen + input_ids.shape[1])[None]
        if self.habit == "no masks" or (self.habit == "counts columns" and attention_mask is not None):
            assert attention_mask is None or attention_mask.dim() == 2
        mask = create_causal_mask(self.config, states, attention_mask, past_key_values=cache, position_ids=position_ids) if (
            compat.CACHE == "past_key_values"
        ) else create_causal_mask(self.config, states, attention_mask, cache=cache, position_ids=position_ids)  # fmt: skip
        if self.habit == "looks at its cache":
            assert type(cache) is DynamicCache
        states = states + self.places(position_ids)
        for index, layer in enumerate(self.layers):
            query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in layer(states).chunk(3, dim=-1))
            key, value = cache.update(key, value, index)
            causal = mask is None and input_ids.shape[1] > 1
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
            states = states + mixed.transpose(1, 2).flatten(-2)
        return CausalLMOutputWithPast(logits=self.head(states), **{compat.CACHE: cache})


def own_model(habit: str) -> Any:
    torch.manual_seed(0)
    model = type("OwnModel", (OwnModel,), {"habit": habit, "__module__": __name__})(OwnConfig()).eval().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("habit", "takes_trees"), [("usual", True), ("counts columns", False)])
def test_from_scratch(habit: str, takes_trees: bool, batch: int) -> None:
    model = specheads.enable(own_model(habit))
    assert family_of(model).takes_trees == takes_trees
    draft = perturbed(model, 0.05)
    given = {**prompt("llama", batch), "do_sample": False, "max_new_tokens": 20}
    plain = model.generate(**given)
    for drafter in ("auto", "recycling", "draft tree"):
        assert torch.equal(model.generate(**given, **arguments(drafter, 3, draft, "llama")), plain)


def test_what_a_trial_does_not_bear_out_is_refused() -> None:
    with pytest.raises(ValueError, match="'of_ones_own'"):
        specheads.enable(own_model("looks at its cache"))


@pytest.mark.parametrize("names_its_inputs", [False, True])
def test_derived_from_a_listed_one(names_its_inputs: bool) -> None:
    class MyConfig(LlamaConfig):
        model_type = "my_llama"

    class MyModel(LlamaForCausalLM):
        config_class = MyConfig

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits * 0.5
            return outputs

    class Named(MyModel):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs: Any) -> Any:
            return super().forward(input_ids, attention_mask, position_ids, **kwargs)

    torch.manual_seed(0)
    special = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.5}
    model_class = Named if names_its_inputs else MyModel
    model = specheads.enable(model_class(MyConfig(**SHAPE, **special)).eval().double())
    # Without the name, plain `generate` gives no positions either, and padding shifts them: as it was, so it stays.
    assert family_of(model).takes_trees == names_its_inputs
    given = {**prompt("llama", 4), "do_sample": False, "max_new_tokens": 20}
    plain = model.generate(**given)
    assert torch.equal(model.generate(**given, **arguments("draft tree", 3, perturbed(model, 0.05), "llama")), plain)
