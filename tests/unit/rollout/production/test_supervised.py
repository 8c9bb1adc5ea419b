"""Conversations for supervised fine-tuning become samples without an engine and without a scorer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import InvalidArgument
from headrace.job.schema.training import TrainSection
from headrace.prompts import chat_message
from headrace.trajectory import Sample, Status
from services.rollout.chat.mask import FAMILIES
from services.rollout.engine.api import SamplingParams
from services.rollout.production.groups import GroupSampler
from services.rollout.production.supervised import ConversationEncoder, SupervisedSampler, supervised_parts
from tests.support.models.chat_templates import CHAT_MODELS, make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_tokenizer

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
    stop, cuts_blanks = FAMILIES[family][0], name.startswith(("qwen3", "glm", "llama"))
    unthought = "\n<think></think>\n" if name.startswith("glm") else ""
    answers = [f"{unthought}The answer is 3.{stop}", f"{unthought}7{stop}" if cuts_blanks else f"\n7{stop}"]
    if name == "deepseek_r1_distill_qwen":  # whose prompts open a thought
        answers = [f"\n</think>\n\n\n7{stop}"]
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
THOUGHT = "Ten threes, and seven: 30 + 21."
WRITTEN: dict[str, dict[str, str]] = {
    "no thought": {"content": "It is 51."},
    "a thought in the content": {"content": f"<think>\n{THOUGHT}\n</think>\n\nIt is 51."},
    "a thought in the content without line breaks": {"content": f"<think>{THOUGHT}</think>It is 51."},
    "the end of a thought that the prompt has opened": {"content": f"{THOUGHT}\n</think>\n\nIt is 51."},
    "a thought of its own": {"content": "It is 51.", "reasoning_content": THOUGHT},
    "a thought of its own by another name": {"content": "It is 51.", "reasoning": THOUGHT},
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
            assert response.count(THOUGHT) == (written != "no thought"), written
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
