"""Conversations for supervised fine-tuning: exactly what assistants wrote is trained, in every family's marks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, InvalidArgument
from headrace.trajectory import Sample, Status
from services.rollout.chat_mask import FAMILIES, ChatMask
from services.rollout.engine.api import SamplingParams
from services.rollout.groups import GroupMaker
from services.rollout.prompts import PromptEncoder
from services.rollout.sampling import SampleRequest
from services.rollout.supervised import SupervisedMaker
from tests.support.tiny_model import make_tiny_tokenizer

TURNS = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "The answer is 3."},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "7"},
]


@pytest.fixture
def encoder(tmp_path: Path) -> PromptEncoder:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    return PromptEncoder(tmp_path, apply_chat_template=False, answers_follow=False)


def trained(encoder: PromptEncoder, tokens: list[int], family: str) -> str:
    mask = ChatMask(encoder.tokenizer, family)(tokens)
    return str(encoder.tokenizer.decode([token for token, one in zip(tokens, mask, strict=True) if one]))


@pytest.mark.parametrize("family", ["qwen", "qwen3"])
def test_every_assistants_turn_and_its_end_are_trained_and_nothing_else(encoder: PromptEncoder, family: str) -> None:
    tokens = list(encoder.encode_messages(TURNS, None).tokens)
    assert trained(encoder, tokens, family) == "The answer is 3.<|im_end|>7<|im_end|>"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_familys_marks_are_found(tmp_path: Path, family: str) -> None:
    marks = FAMILIES[family]
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks.closings])
    tokenizer.save_pretrained(tmp_path)
    encoder = PromptEncoder(tmp_path, apply_chat_template=False)
    text = f"hello {marks.opening}first{marks.closings[0]} well {marks.opening}second"
    tokens = list(encoder.encode_plain(text).tokens)
    assert trained(encoder, tokens, family) == f"first{marks.closings[0]}second"


def test_a_tokenizer_of_another_family_is_refused(encoder: PromptEncoder) -> None:
    with pytest.raises(ConfigError, match=r"no token for any of <\|eot_id\|>.*--loss-mask-type llama3 is of another"):
        ChatMask(encoder.tokenizer, "llama3")


def test_a_conversation_without_an_assistant_is_refused(encoder: PromptEncoder) -> None:
    with pytest.raises(InvalidArgument, match="no assistant's turn"):
        ChatMask(encoder.tokenizer, "qwen3")(encoder.encode_messages(TURNS[:1], None).tokens)


async def test_a_conversation_becomes_a_sample_and_one_without_an_assistant_a_failed_one(
    encoder: PromptEncoder,
) -> None:
    maker = SupervisedMaker(ChatMask(encoder.tokenizer, "qwen3"))
    requests = [
        SampleRequest(f"s{n}", "g", n, encoder.encode_messages(TURNS[:turns], None), None, {}, SamplingParams(1))
        for n, turns in enumerate((4, 1))
    ]
    whole, without = await maker.make_all(requests, evaluation=False)
    assert whole.status is Status.COMPLETED
    assert whole.loss_mask[0] == 1
    assert whole.tokens.tolist() == list(requests[0].prompt.tokens)
    kept = whole.tokens[whole.prompt_length :][whole.loss_mask == 1]
    assert encoder.tokenizer.decode(kept.tolist()) == "The answer is 3.<|im_end|>7<|im_end|>"
    assert without.status is Status.FAILED
    assert without.failure is not None


async def test_a_leased_conversation_is_put_without_an_engine_and_without_a_judge(encoder: PromptEncoder) -> None:
    maker = SupervisedMaker(ChatMask(encoder.tokenizer, "qwen3"))
    groups = GroupMaker(
        encoder, maker, None, SamplingParams(1), rollout_seed=1, max_prompt_tokens=None, max_context_tokens=None
    )
    messages = [sample_pb2.ChatMessage(role=turn["role"], content=turn["content"]) for turn in TURNS]
    prompt = sample_pb2.Prompt(prompt_id="p", messages=sample_pb2.ChatMessages(messages=messages))
    put = await groups.make(buffer_pb2.GroupLease(lease_id="l", group_id="g", n_samples=1, attempt=1, prompt=prompt))
    assert isinstance(put, buffer_pb2.GroupPut)
    assert put.outcome == buffer_pb2.PUT_OUTCOME_COMPLETE
    (sample,) = [Sample.unpack(packed) for packed in put.samples]
    assert sample.reward is None
    assert int(sample.loss_mask.sum()) == put.samples[0].envelope.trained_tokens > 0
