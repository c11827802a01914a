"""Labels decoded under the mask are what the assistant wrote."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from specheads.evaluation.prompts import InputError
from specheads.training import chat_format
from specheads.training.encoding import Encoder

from .templates import FIVE, TEMPLATES, chat, tokenizer_for

CONVERSATIONS = {
    "one turn": chat("What is the capital of France?", "Paris."),
    "two turns": chat("Is it?", "Yes, it is.", "And then?", "I do not know."),
    "repeated replies": chat("Yes.", "Yes.", "Yes.", "Yes.", "Yes.", "Yes."),
    "the reply quotes the question": chat("Say no.", "Say no. No.", "Say no. No.", "no"),
    "a part of the other": chat("Paris is the capital", "Paris", "Paris", "Paris is"),
    "other scripts": chat("Où?", "À Paris - 東京 🗼.", "東京", "東京 🗼"),
    "lines": chat("Write code.", "def add(a, b):\n    return a + b\n\n\nDone", "Again.", "    x = 1\n    y"),
    "names of roles": chat("assistant", "assistant\nuser", "model", "[/INST model assistant"),
}


def replies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


def learned(name: str, row: dict[str, Any], arguments: dict[str, Any] | None = None) -> list[list[str]]:
    """Per example, the runs of learned tokens, decoded."""
    tokenizer = tokenizer_for(name)
    found = []
    for example in Encoder(tokenizer, arguments).examples(row, "row 1"):
        runs: list[list[int]] = []
        before = False
        for token, is_learned in zip(example["input_ids"], example["loss_mask"], strict=True):
            if is_learned and not before:
                runs.append([])
            if is_learned:
                runs[-1].append(token)
            before = is_learned
        found.append([tokenizer.decode(run) for run in runs])
    return found


def expected(name: str, texts: list[str]) -> list[str]:
    template = TEMPLATES[name]
    shown = [text.strip() if "trim" in template.source else text for text in texts]
    return [template.lead + text + template.end for text in shown]


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", [name for name in FIVE if name != "qwen3"])
def test_learned_text_is_the_replies(name: str, messages: list[dict[str, Any]]) -> None:
    assert learned(name, {"messages": messages}) == [expected(name, replies(messages))]


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_without_thinking_each_reply_is_learned_as_it_is_served(messages: list[dict[str, Any]]) -> None:
    # Earlier replies are rendered without the empty thought that the last one is asked for with.
    answers = [text.lstrip("\n") for text in replies(messages)]
    assert learned("qwen3", {"messages": messages}, {"enable_thinking": False}) == [[text + "<|im_end|>"] for text in answers]


def test_an_empty_thought_that_the_template_adds_is_not_learned() -> None:
    messages = CONVERSATIONS["two turns"]
    assert learned("qwen3", {"messages": messages}) == [["Yes, it is.<|im_end|>"], ["I do not know.<|im_end|>"]]


def test_with_thinking_the_thought_is_learned() -> None:
    messages = chat("Is it?", "<think>\nPerhaps.\n</think>\n\nYes.", "Sure?", "<think>\nHm.\n</think>\n\nYes.")
    assert learned("qwen3", {"messages": messages}) == [[text + "<|im_end|>"] for text in replies(messages)]
    # What the second reply is written after has no thought in it.
    tokenizer = tokenizer_for("qwen3")
    *_, second = Encoder(tokenizer).examples({"messages": messages}, "row 1")
    assert "Perhaps" not in tokenizer.decode(second["input_ids"])
    assert tokenizer.decode(second["input_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("name", FIVE)
def test_ids_are_those_of_the_whole_text(name: str) -> None:
    tokenizer, messages = tokenizer_for(name), CONVERSATIONS["one turn"]
    (example,) = Encoder(tokenizer).examples({"messages": messages}, "row 1")
    assert example["input_ids"] == tokenizer.apply_chat_template(messages)["input_ids"]


@pytest.mark.parametrize("name", FIVE)
def test_all_shapes_give_the_same_labels(name: str) -> None:
    messages = CONVERSATIONS["one turn"]
    question, answer = (message["content"] for message in messages)
    tokenizer = tokenizer_for(name)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    shapes = [
        {"messages": messages},
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
        {"conversations": messages},
        {"prompt": messages[:1], "completion": messages[1:]},
        {"prompt": messages[:1], "completion": answer},
        {"prompt": question, "completion": answer},
        {"text": text},
        {"prompt": asked, "completion": text[len(asked) :].rstrip("\n")},
    ]
    first, *others = [list(Encoder(tokenizer).examples(shape, "row 1")) for shape in shapes]
    assert any(first[0]["loss_mask"])
    assert all(other == first for other in others[:-1])
    # The completion is ended by its end token; a template may write a line end after that.
    length = len(others[-1][0]["input_ids"])
    assert others[-1] == [{column: values[:length] for column, values in first[0].items()}]
    assert not any(first[0]["loss_mask"][length:])


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("conversation", ["two turns", "repeated replies", "names of roles"])
def test_several_turns_of_any_shape(name: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    tokenizer = tokenizer_for(name)
    sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in messages]
    shapes: list[dict[str, Any]] = [
        {"messages": messages},
        {"conversations": sharegpt},
        {"prompt": messages[:1], "completion": messages[1:]},
    ]
    if name != "qwen3":  # a text cannot be rendered once per reply
        shapes.append({"text": tokenizer.apply_chat_template(messages, tokenize=False)})
    first, *others = [list(Encoder(tokenizer).examples(shape, "row 1")) for shape in shapes]
    assert all(other == first for other in others)


def test_a_plain_text_is_learned_as_a_whole_and_ended() -> None:
    tokenizer = tokenizer_for("gemma")
    (example,) = Encoder(tokenizer).examples({"text": "Paris is the capital."}, "row 1")
    assert tokenizer.decode(example["input_ids"]) == "Paris is the capital.<eos>"
    assert all(example["loss_mask"])


def test_a_completion_without_a_template_begins_where_the_prompt_ends() -> None:
    tokenizer = _without_template()
    (example,) = Encoder(tokenizer).examples({"prompt": "What is it?", "completion": " It is."}, "row 1")
    ids = [token for token, is_learned in zip(example["input_ids"], example["loss_mask"], strict=True) if is_learned]
    assert tokenizer.decode(ids) == " It is.<|im_end|>"
    with pytest.raises(InputError, match="row 1: a conversation needs a chat template"):
        list(Encoder(tokenizer).examples({"messages": chat("a", "b")}, "row 1"))


def _without_template() -> Any:
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.chat_template = None
    return tokenizer


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("Is it?", "Yes", "Sure?", "I am so"), "finish_reason": "length"},
        {"prompt": chat("Is it?", "Yes", "Sure?"), "completion": "I am so", "finish_reason": "length"},
    ],
)
def test_the_end_of_a_cut_reply_is_not_learned(row: dict[str, Any]) -> None:
    assert learned("chatml", row) == [["Yes<|im_end|>", "I am so"]]
    assert learned("chatml", {**row, "finish_reason": "stop"}) == [["Yes<|im_end|>", "I am so<|im_end|>"]]


def test_the_end_of_a_cut_text_is_not_learned() -> None:
    text = tokenizer_for("chatml").apply_chat_template(chat("Is it?", "I am so"), tokenize=False)
    assert learned("chatml", {"text": text, "finish_reason": "length"}) == [["I am so"]]
    assert learned("chatml", {"text": "I am so", "finish_reason": "length"}) == [["I am so"]]


def test_what_follows_the_last_reply_is_left_out() -> None:
    tokenizer, messages = tokenizer_for("chatml"), chat("Is it?", "Yes.", "Sure?")
    (example,) = Encoder(tokenizer).examples({"messages": messages}, "row 1")
    assert "Sure" not in tokenizer.decode(example["input_ids"])


def test_replies_are_kept_as_they_were_written() -> None:
    thoughts = ["Perhaps.\n</think>\n\nYes.", "I do not"]
    row = {"messages": chat("Is it?", thoughts[0], "Sure?", thoughts[1]), "written": thoughts, "finish_reason": "length"}
    assert learned("opens-thought", row) == [[thoughts[0] + "<|im_end|>"], [thoughts[1]]]
    tokenizer = tokenizer_for("opens-thought")
    _, second = Encoder(tokenizer).examples(row, "row 1")
    assert tokenizer.decode(second["input_ids"]).startswith(
        "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n\n\nYes.<|im_end|>\n<|im_start|>user\nSure?"
    )


def test_a_template_that_renders_replies_otherwise_than_it_asks_for_them_is_refused() -> None:
    with pytest.raises(InputError, match=r"row 1: the chat template asks for a reply with .*<think>"):
        learned("opens-thought", {"messages": chat("Is it?", "Hm.</think>Yes.")})


def test_the_templates_own_marks_count_where_it_cannot_be_taken_apart() -> None:
    tokenizer = copy.deepcopy(tokenizer_for("opens-thought"))
    shown = "{{ message['content'].split('</think>')[-1] }}"
    tokenizer.chat_template = tokenizer.chat_template.replace(shown, "{% generation %}" + shown + "{% endgeneration %}")
    messages = chat("Yes.", "Yes.", "Yes.", "Hm.</think>Yes.")
    (example,) = Encoder(tokenizer).examples({"messages": messages}, "row 1")
    ids = [token for token, is_learned in zip(example["input_ids"], example["loss_mask"], strict=True) if is_learned]
    assert tokenizer.decode(ids) == "Yes.<|im_end|>Yes.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": [{"role": "user", "content": "Is it?"}]}, "no reply to learn from: the roles are user"),
        ({"question": "Is it?", "answer": "Yes"}, "this one has `question`, `answer`"),
        ({}, "this one has nothing"),
        ({"messages": None, "id": "1"}, r"this one has `messages` \(null\), `id`\. Rename its columns or leave the row out"),
        ({"messages": []}, "a list of messages that is not empty"),
        ({"messages": [{"speaker": "user"}]}, "must have `role` and `content`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "trained on text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "trained on text"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be a string"),
        ({"messages": chat("Is it?", ""), "finish_reason": "length"}, "nothing to learn from"),
        ({"messages": chat("Is it?", "Yes."), "written": ["Yes.", "No."]}, "2 entries for 1 replies"),
        ({"prompt": chat("Is it?")}, "this one has `prompt`"),
    ],
)
def test_a_row_of_no_use_is_refused_by_its_place(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^row 1: .*{sentence}"):
        learned("chatml", row)


def test_what_the_template_refuses_is_refused_with_its_words() -> None:
    messages = [{"role": "system", "content": "Be kind."}, *chat("Is it?", "Yes.")]
    with pytest.raises(InputError, match=r"row 1: .*of system, user.*System role not supported"):
        learned("gemma", {"messages": messages})


def test_tools_are_shown_to_the_template() -> None:
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.chat_template = "{% for tool in tools or [] %}<{{ tool['name'] }}>{% endfor %}" + tokenizer.chat_template
    for tools in ([{"name": "search"}], '[{"name": "search"}]'):
        (example,) = Encoder(tokenizer).examples({"messages": chat("a", "b"), "tools": tools}, "row 1")
        assert tokenizer.decode(example["input_ids"]).startswith("<search>")


def by_search(self: Any, chat: Any, places: list[int], place: str) -> Any:
    """Finds replies by looking for their text, as trainers have done."""
    text = self.render(chat.messages, chat.tools, place)
    found = [(text.find(chat.messages[number]["content"]), chat.messages[number]["content"]) for number in places]
    return self.with_replies(text, [(start, start + len(reply) + len(self.end)) for start, reply in found])


def by_position(shift: int) -> Callable[..., Any]:
    def at_once(self: Any, chat: Any, places: list[int], place: str) -> Any:
        rendered = original(self, chat, places, place)
        return rendered and self.with_replies(rendered.text, [(start + shift, stop) for start, stop in rendered.replies])

    original = chat_format.ChatFormat._at_once
    return at_once


def without_ends(self: Any, text: str, start: int) -> int:
    return text.rfind(self.end)


@pytest.mark.parametrize(
    ("attribute", "mutant"),
    [("_at_once", by_search), ("_at_once", by_position(2)), ("_at_once", by_position(-2)), ("_stop", without_ends)],
    ids=["by search", "late", "early", "without ends"],
)
def test_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch, attribute: str, mutant: Callable[..., Any]) -> None:
    messages = CONVERSATIONS["repeated replies"]
    assert learned("chatml", {"messages": messages}) == [expected("chatml", replies(messages))]
    monkeypatch.setattr(chat_format.ChatFormat, attribute, mutant)
    assert learned("chatml", {"messages": messages}) != [expected("chatml", replies(messages))]


def test_a_template_that_opens_replies_with_nothing_makes_no_prompt_a_rendered_one() -> None:
    tokenizer = copy.deepcopy(tokenizer_for("chatml"))
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    )
    (pair,) = Encoder(tokenizer).examples({"prompt": "Is it?", "completion": "Yes."}, "row 1")
    (messages,) = Encoder(tokenizer).examples({"messages": chat("Is it?", "Yes.")}, "row 1")
    assert pair == messages and tokenizer.decode(pair["input_ids"]) == "Is it?Yes.<|im_end|>"
