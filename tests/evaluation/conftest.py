"""A random Llama of a few thousand weights, with a tokenizer that knows every byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}[assistant] "


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["<end>"] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.5,  # so that texts differ and few scores are near to a tie
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"question_id": 1, "category": "writing", "turns": ["abcabcabcabc", "Again."]}\n'
        '{"question_id": 2, "category": "writing", "turns": ["one two one two one"]}\n'
        '{"question_id": 3, "category": "qa", "turns": ["Why?"]}\n',
        encoding="utf-8",
    )
    return path
