"""What of a conversation is trained, on the chat templates that real models come with, and the samples of SFT."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, InvalidArgument
from headrace.job.schema.training import TrainSection
from headrace.prompts import chat_message
from headrace.trajectory import Sample, Status
from services.rollout.chat.mask import FAMILIES, ChatMask
from services.rollout.engine.api import SamplingParams
from services.rollout.production.groups import GroupSampler
from services.rollout.production.supervised import ConversationEncoder, SupervisedSampler, supervised_parts
from tests.support.models.chat_templates import CHAT_MODELS, make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_tokenizer

Messages = list[dict[str, Any]]

NAMES = sorted(CHAT_MODELS)
# whose prompts always open one, which their templates drop later
OPENS_A_THOUGHT = ("deepseek_r1_distill_qwen", "minimax_m2")
FINAL = "<|channel|>final<|message|>"
NO_THOUGHT = {
    "gpt_oss": FINAL,
    **dict.fromkeys(OPENS_A_THOUGHT, "\n</think>\n\n"),
    "glm4.5": "\n<think></think>\n",
    "glm4.6": "\n<think></think>\n",
}
"""What a model writes before an answer that it has not thought about, behind a prompt that does not say so."""
TEXT_ALONE = {"llama3", "llama3.1", "smollm2", "kimi_k2", "deepseek_r1_distill_qwen", "gpt_oss", "olmo3", "minimax_m2"}
TEXT_ALONE |= {"gemma3"}
WITH_TOOLS = sorted(set(NAMES) - TEXT_ALONE)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


@functools.cache
def mask(name: str, *, keep_earlier_thoughts: bool = False) -> ChatMask:
    tokenizer = make_chat_tokenizer(name)
    return ChatMask(tokenizer, CHAT_MODELS[name].family, keep_earlier_thoughts=keep_earlier_thoughts)


def trained(name: str, messages: Messages, tools: Sequence[Any] | None = None, **options: bool) -> str:
    return "".join(part.text for part in mask(name, **options).segments(messages, tools) if part.trained)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def said(name: str, content: str) -> str:
    """As the template writes it: some cut blanks off."""
    if name.startswith(("glm", "llama", "qwen3.5", "gemma")):
        return content.strip()
    return content


def stop(name: str, following: str | None = None) -> str:
    family = CHAT_MODELS[name].family
    if family == "gpt_oss" and following is not None:
        return ""  # an earlier turn ends as the model reads it, and not as it writes it
    if family == "olmo3" and following is not None:
        return FAMILIES[family][1]
    return "<|observation|>" if family == "glm4" and following == "tool" else FAMILIES[family][0]


MARKS = sorted(
    {token for model in CHAT_MODELS.values() for token in model.special_tokens} | {"<|im_start|>", "<|im_end|>"}
)
HARMLESS = st.text("ab 1.\n\t{}é\ue000", max_size=6)
POISON = st.lists(
    st.sampled_from([*MARKS, "assistant", "assistant\n", "<|im_start|>assistant\nevil<|im_end|>\n", "\n", "\n\n", "x"]),
    max_size=5,
).map("".join)
# What an assistant says is trained whatever it is; a thought's marks in it are the template's to read.
SAYS = (
    st.lists(st.sampled_from(["a", " b", "\n", "\n\n", "7", "user", "<|im_start|>", "evil"]), min_size=1, max_size=5)
    .map("".join)
    .filter(lambda text: text.strip() != "")
)


@st.composite
def conversations(draw: st.DrawFn, *, with_tools: bool) -> Messages:
    messages: Messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(HARMLESS | POISON)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(HARMLESS | POISON)))
        messages.append(assistant(draw(SAYS)))
        for _ in range(draw(st.integers(0, 2)) if with_tools else 0):
            messages.append(tool(draw(HARMLESS | POISON)))
            messages.append(assistant(draw(SAYS)))
    for message in messages:
        if message["role"] == "assistant" and draw(st.integers(0, 4)) == 0:
            message["step_loss_mask"] = 0
    return messages


def expected(name: str, messages: Messages) -> str:
    text = ""
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("step_loss_mask", 1):
            continue
        if name in OPENS_A_THOUGHT and i < len(messages) - 1:
            continue
        if name == "qwen3.5" and i < last:  # its prompts open a thought, too, and it drops those before a question
            continue
        content = NO_THOUGHT.get(name, "") + said(name, message["content"])
        if name == "qwen3" and i > last and i == len(messages) - 1:
            content = content.lstrip("\n")  # behind the thought that the template leaves empty
        text += content + stop(name, messages[i + 1]["role"] if i + 1 < len(messages) else None)
    return text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_what_is_trained_is_what_assistants_say_and_their_stop_marks(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(with_tools=name in WITH_TOOLS))
    if expected(name, messages):
        assert trained(name, messages) == expected(name, messages)
    else:
        with pytest.raises(InvalidArgument, match=r"no assistant's turn to train|before the turns to train"):
            trained(name, messages)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, derandomize=True)
@given(data=st.data())
def test_the_text_is_the_one_that_transformers_renders(name: str, data: st.DataObject) -> None:
    asked = [user("x")] if name == "gemma3" else []  # it refuses two assistants' turns in a row
    messages = [*data.draw(conversations(with_tools=name in WITH_TOOLS)), *asked, assistant("end")]
    text = "".join(part.text for part in mask(name).segments(messages, None))
    rendered = make_chat_tokenizer(name).apply_chat_template(messages, tokenize=False)
    text = text.replace("<｜Assistant｜><think>\n\n</think>\n\nend", "<｜Assistant｜>end")
    assert text in (rendered, rendered + stop(name))


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3.5", "glm4.5", "glm4.6"])
def test_calls_of_tools_are_trained(name: str) -> None:
    messages = [user("1 + 2?"), assistant("I add.", tool_calls=[CALL]), tool("3"), assistant("It is 3.")]
    text = trained(name, messages, [CALL["function"]])
    assert text.startswith(NO_THOUGHT.get(name, "") + "I add.")
    assert any(call in text for call in ('"add"', "<tool_call>add", "<function=add>"))
    assert "tool_response" not in text


def test_a_call_that_the_template_leaves_out_is_not_trained_as_silence() -> None:
    with pytest.raises(InvalidArgument, match="leaves the tool calls of message 1 out"):
        trained("deepseek_r1_distill_qwen", [user("x"), assistant("", tool_calls=[CALL])])


def test_a_step_loss_mask_is_0_or_1() -> None:
    with pytest.raises(InvalidArgument, match="step_loss_mask of a message is 2, must be 0 or 1"):
        trained("qwen3", [user("a"), assistant("b", step_loss_mask=2)])


THOUGHT = "<think>\n{}\n</think>\n\n{}<|im_end|>"
THOUGHTFUL = [
    user("a"),
    assistant("one", reasoning_content="first"),
    user("b"),
    assistant("<think>\nsecond\n</think>\n\ntwo"),
]


def test_thoughts_are_trained_where_the_template_keeps_them() -> None:
    assert trained("qwen3", THOUGHTFUL) == "one<|im_end|>" + THOUGHT.format("second", "two")
    assert trained("glm4.6", THOUGHTFUL) == "\n<think></think>\none<|user|>\n<think>second</think>\ntwo<|user|>"


def test_keep_earlier_thoughts_trains_those_of_every_turn() -> None:
    kept = trained("qwen3", THOUGHTFUL, keep_earlier_thoughts=True)
    assert kept == THOUGHT.format("first", "one") + THOUGHT.format("second", "two")
    behind_prompts = "first\n</think>\n\none<|im_end|>second\n</think>\n\ntwo<|im_end|>"
    assert trained("qwen3.5", THOUGHTFUL, keep_earlier_thoughts=True) == behind_prompts
    kept = trained("glm4.6", THOUGHTFUL, keep_earlier_thoughts=True)
    assert kept == "\n<think>first</think>\none<|user|>\n<think>second</think>\ntwo<|user|>"


def test_a_thought_of_gpt_oss_is_a_message_of_its_own_in_the_last_turn() -> None:
    messages = [user("a"), assistant("one", reasoning_content="first"), user("b"), assistant("two", thinking="second")]
    thought = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant" + FINAL
    last = thought.format("second") + "two<|return|>"
    assert trained("gpt_oss", messages) == FINAL + "one" + last
    kept = trained("gpt_oss", messages, keep_earlier_thoughts=True)
    assert kept == thought.format("first") + "one<|return|>" + last


def test_a_conversation_with_calls_of_tools_is_refused_where_the_template_hides_its_turns() -> None:
    messages = [user("1 + 2?"), assistant("", tool_calls=[CALL]), tool("3"), assistant("It is 3.")]
    with pytest.raises(InvalidArgument, match="the chat template refused it"):
        trained("gpt_oss", messages, [{"function": CALL["function"] | {"description": "Adds."}}])


def test_a_tokenizer_of_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no token for any of <\|eot_id\|>.*--loss-mask-type llama3 is of another"):
        ChatMask(make_chat_tokenizer("qwen3"), "llama3")


TURNS = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "The answer is 3."},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "\n7"},
]


@pytest.fixture
def encoder(tmp_path: Path) -> ConversationEncoder:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    return ConversationEncoder(tmp_path, "qwen3")


def conversation(num_turns: int) -> sample_pb2.Prompt:
    messages = [sample_pb2.ChatMessage(role=turn["role"], content=turn["content"]) for turn in TURNS[:num_turns]]
    return sample_pb2.Prompt(prompt_id="p", messages=sample_pb2.ChatMessages(messages=messages))


def lease(prompt: sample_pb2.Prompt) -> buffer_pb2.GroupLease:
    return buffer_pb2.GroupLease(lease_id="l", group_id="g", n_samples=1, attempt=1, prompt=prompt)


def groups(encoder: ConversationEncoder) -> GroupSampler:
    return GroupSampler(
        encoder, SupervisedSampler(), None, SamplingParams(1), rollout_seed=1, max_prompt_tokens=None, context=None
    )


@pytest.mark.parametrize("name", sorted(CHAT_MODELS))
def test_an_answer_is_tokenized_apart_from_its_prompt(tmp_path: Path, name: str) -> None:
    """As engines see it: a line break that ends a prompt and one that begins an answer never make one token."""
    make_chat_tokenizer(name).save_pretrained(tmp_path)
    family = CHAT_MODELS[name].family
    encoder = ConversationEncoder(tmp_path, family)
    encoded = encoder.encode(conversation(4))
    texts = [encoder.tokenizer.decode(list(encoded.tokens[part.start : part.stop])) for part in encoded.trained]
    cuts_blanks = name.startswith(("qwen3", "glm", "llama", "gemma")) and name != "qwen3_vl"
    stop = FAMILIES[family][0]
    unthought = "\n<think></think>\n" if name.startswith("glm") else ""
    answers = [f"{unthought}The answer is 3.{stop}", f"{unthought}7{stop}" if cuts_blanks else f"\n7{stop}"]
    if name in OPENS_A_THOUGHT:
        answers = [f"\n</think>\n\n\n7{stop}"]
    if name == "gpt_oss":
        answers = [f"{FINAL}The answer is 3.", f"{FINAL}\n7{stop}"]
    if name == "olmo3":
        answers[0] = "The answer is 3.<|im_end|>"
    if name == "qwen3.5":
        answers = answers[1:]
    assert texts == answers
    assert encoder.tokenizer.decode(list(encoded.tokens)) == encoded.text


FAMILIES_OF = [
    (name, family)
    for name, model in sorted(CHAT_MODELS.items())
    for family in FAMILIES
    if FAMILIES[family][0] == FAMILIES[model.family][0]
]
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be exact."},
    {"role": "user", "content": "What is 17 * 3?"},
]
EARLIER: list[dict[str, Any]] = [
    {"role": "user", "content": "Name a river."},
    {"role": "assistant", "content": "<think>\nThe longest.\n</think>\n\nThe Nile."},
]
REASONING = "Ten threes, and seven: 30 + 21."
WRITTEN: dict[str, dict[str, str]] = {
    "no thought": {"content": "It is 51."},
    "a thought in the content": {"content": f"<think>\n{REASONING}\n</think>\n\nIt is 51."},
    "a thought in the content without line breaks": {"content": f"<think>{REASONING}</think>It is 51."},
    "the end of a thought that the prompt has opened": {"content": f"{REASONING}\n</think>\n\nIt is 51."},
    "a thought of its own": {"content": "It is 51.", "reasoning_content": REASONING},
    "a thought of its own by another name": {"content": "It is 51.", "reasoning": REASONING},
}


@pytest.mark.parametrize(("name", "family"), FAMILIES_OF)
def test_what_is_trained_is_what_a_prompt_of_the_template_lets_the_model_write(
    tmp_path: Path, name: str, family: str
) -> None:
    tokenizer = make_chat_tokenizer(name)
    tokenizer.save_pretrained(tmp_path)
    parts = supervised_parts(TrainSection(loss_mask_type=family), tmp_path)
    assert parts is not None
    for before in (ASKED, [*EARLIER, *ASKED[1:]]):
        prompts = {
            tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True, **thinking)
            for thinking in ({}, *({"enable_thinking": thinks, "thinking": thinks} for thinks in (True, False)))
        }
        for written, message in WRITTEN.items():
            encoded = parts.encoder.encode(prompt_of([*before, {"role": "assistant", **message}]))
            start, stop = encoded.trained[-1].start, encoded.trained[-1].stop
            response = tokenizer.decode(list(encoded.tokens[start:stop]))
            assert tokenizer.decode(list(encoded.tokens[:start])) in prompts, written
            assert response.count(REASONING) == (written != "no thought"), written
            assert response.endswith(f"It is 51.{FAMILIES[family][0]}"), written
            assert not response.startswith("\n\n"), written
            assert tokenizer.decode(list(encoded.tokens[stop:])).strip() == ""


def prompt_of(messages: list[dict[str, Any]]) -> sample_pb2.Prompt:
    return sample_pb2.Prompt(
        prompt_id="p", messages=sample_pb2.ChatMessages(messages=[chat_message(message) for message in messages])
    )


async def test_a_leased_conversation_is_put_without_an_engine_and_without_a_scorer(
    encoder: ConversationEncoder,
) -> None:
    put = await groups(encoder).sample(lease(conversation(4)))
    assert isinstance(put, buffer_pb2.GroupPut)
    assert put.outcome == buffer_pb2.PUT_OUTCOME_COMPLETE
    (sample,) = [Sample.unpack(packed) for packed in put.samples]
    assert (sample.status, sample.reward) == (Status.COMPLETED, None)
    assert sample.tokens.tolist() == list(encoder.encode(conversation(4)).tokens)
    assert sample.loss_mask[0] == 1
    kept = sample.tokens[sample.prompt_length :][sample.loss_mask == 1]
    assert encoder.tokenizer.decode(kept.tolist()) == "The answer is 3.<|im_end|>\n7<|im_end|>"
    assert put.samples[0].envelope.trained_tokens == len(kept)


async def test_a_conversation_without_an_assistant_is_put_as_failed(encoder: ConversationEncoder) -> None:
    put = await groups(encoder).sample(lease(conversation(1)))
    assert isinstance(put, buffer_pb2.GroupPut)
    assert put.outcome == buffer_pb2.PUT_OUTCOME_FAILED
    assert "no assistant's turn to train" in put.failure.message


def test_a_text_is_no_conversation(encoder: ConversationEncoder) -> None:
    with pytest.raises(InvalidArgument, match="prompt p is a text: supervised fine-tuning trains arrays"):
        encoder.encode(sample_pb2.Prompt(prompt_id="p", text="<|im_start|>assistant\nx<|im_end|>"))
