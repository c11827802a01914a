"""The templates of published models, as trl ships them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trl

from specheads.training.encoding import Encoder

from .templates import Template, chat, tokenizer_of

FOLDER = Path(trl.__file__).parent / "chat_templates"
SPECIAL = r"<\|[^|>\s]+\|>|<｜[^｜]+｜>|</?s>|<(?:bos|eos|start_of_turn|end_of_turn|end_of_utterance|turn\||\|turn)>|\[/?INST\]"  # noqa: RUF001
# Per template its end token, as the model's own config has it, and what the model writes before the text.
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>", ""),
    "cohere2": ("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", ""),
    "gemma": ("<end_of_turn>", ""),
    "gemma3": ("<end_of_turn>", ""),
    "glm4moe": ("<|user|>", ""),
    "gptoss": ("<|return|>", "<|channel|>final<|message|>"),
    "idefics3": ("<end_of_utterance>", " "),
    "lfm2": ("<|im_end|>", ""),
    "llama3": ("<|eot_id|>", ""),
    "llama3_1": ("<|eot_id|>", ""),
    "llama3_2": ("<|eot_id|>", ""),
    "llava_next": ("</s>", " "),
    "phi3": ("<|end|>", ""),
    "phi3_5": ("<|end|>", ""),
    "qwen2_5": ("<|im_end|>", ""),
    "qwen2_5_vl": ("<|im_end|>", ""),
    "qwen3": ("<|im_end|>", ""),
    "qwen3_instruct_2507": ("<|im_end|>", ""),
    "qwen3_vl": ("<|im_end|>", ""),
    "smolvlm": ("<end_of_utterance>", " "),
}


@pytest.mark.parametrize("name", ENDS)
def test_learned_text_is_the_replies(name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    end, lead = ENDS[name]
    special = sorted({*re.findall(SPECIAL, source), "<s>", "</s>"})
    tokenizer = tokenizer_of(Template(source, tuple(special), "</s>", end))
    replies = ("Yes.", "Yes.", "No. Yes.")
    messages = chat("Yes.", replies[0], "Yes.", replies[1], "Is it? Yes.", replies[2])
    learned = ""
    for example in Encoder(tokenizer).examples({"messages": messages}, "row 1"):
        marked = zip(example["input_ids"], example["loss_mask"], strict=True)
        learned += tokenizer.decode([token for token, is_learned in marked if is_learned])
    assert learned == "".join(lead + reply + end for reply in replies)
