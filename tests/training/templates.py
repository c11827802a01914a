"""Chat templates of five kinds, written out here, each with a tokenizer trained on a few lines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for message in messages %}<|head|>{{ message['role'] }}<|/head|>\n\n"
    "{{ message['content'] | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "<start_of_turn>{{ role }}\n{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Reasoning is rendered in the last turn only.
QWEN3 = (
    "{% set last = namespace(user=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% set answer = message['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 > last.user %}{% set thought = '' %}{% if '</think>' in message['content'] %}"
    "{% set thought = message['content'].split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' + answer }}{% else %}{{ answer }}{% endif %}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Asks for reasoning, and never renders it (as distilled reasoning models do).
OPENS_THOUGHT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{{ message['content'].split('</think>')[-1] }}<|im_end|>\n{% else %}<|im_start|>user\n{{ message['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CORPUS = (
    "Paris is the capital of France, and France is a country in Europe.",
    "You are a helpful assistant. I am sorry, but I do not know the answer to that question.",
    "def add(a, b):\n    return a + b\n",
    "What is the answer? The answer is forty two. Yes, it is. No, it is not.",
)


@dataclass(frozen=True)
class Template:
    """A template, and what the others tests need to know of it.

    Args:
        source: In Jinja.
        special: The special tokens of its tokenizer.
        eos: The one that the tokenizer says ends a text.
        end: The one that ends a reply.
        lead: What the template writes before a reply within what the model writes.
    """

    source: str
    special: tuple[str, ...]
    eos: str
    end: str
    lead: str = ""


TEMPLATES = {
    "chatml": Template(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    "llama3": Template(
        LLAMA3, ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|end_of_text|>"), "<|end_of_text|>", "<|eot|>"
    ),
    "gemma": Template(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<end_of_turn>"),
    "mistral": Template(MISTRAL, ("<s>", "</s>"), "</s>", "</s>", lead=" "),
    "qwen3": Template(QWEN3, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "<|endoftext|>", "<|im_end|>"),
    "opens-thought": Template(OPENS_THOUGHT, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
}
FIVE = ("chatml", "llama3", "gemma", "mistral", "qwen3")


@cache
def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    return tokenizer_of(TEMPLATES[name])


def tokenizer_of(template: Template) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in template.special],
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    bos = next((token for token in template.special if token in ("<bos>", "<s>", "<|begin|>")), None)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=template.eos, pad_token=template.eos, **({"bos_token": bos} if bos else {})
    )
    tokenizer.chat_template = template.source
    return tokenizer


def chat(*turns: str) -> list[dict[str, Any]]:
    """A conversation; user and assistant take turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]
