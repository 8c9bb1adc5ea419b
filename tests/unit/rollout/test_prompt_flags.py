"""Flags of prompts act on the parts that are built of a job: --apply-chat-template, --keep-earlier-thoughts."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.sample.v1 import sample_pb2
from headrace.job.schema.job import Job
from headrace.job.schema.training import TrainSection
from services.rollout.build import rollout_service
from services.rollout.production.supervised import supervised_parts
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3


@pytest.mark.parametrize("apply", [False, True])
async def test_a_text_is_one_user_turn_where_apply_chat_template_says_so(tmp_path: Path, apply: bool) -> None:
    model = tmp_path / "model"
    make_tiny_qwen3(model)
    make_chat_tokenizer("qwen3").save_pretrained(model)
    job = Job.model_validate(
        {
            "model": {"hf_checkpoint": model},
            "data": {"apply_chat_template": apply},
            "services": {"buffer_address": "127.0.0.1:1", "reward_address": "127.0.0.1:2"},
        }
    )
    service = rollout_service(job, lambda number: FakeEngine(WIRE), tmp_path, CollectorRegistry())
    try:
        text = service.parts.encoder.encode_text("hello").text
    finally:
        await service.stop()
    assert ("<|im_start|>user\nhello<|im_end|>" in text) == apply


@pytest.mark.parametrize("keep", [False, True])
def test_an_earlier_turns_thought_is_trained_where_keep_earlier_thoughts_says_so(tmp_path: Path, keep: bool) -> None:
    make_chat_tokenizer("qwen3").save_pretrained(tmp_path)
    parts = supervised_parts(TrainSection(loss_mask_type="qwen3", keep_earlier_thoughts=keep), tmp_path)
    assert parts is not None
    turns = [("user", "a"), ("assistant", "<think>\nfirst\n</think>\n\nb"), ("user", "c"), ("assistant", "d")]
    messages = [sample_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    prompt = sample_pb2.Prompt(prompt_id="p", messages=sample_pb2.ChatMessages(messages=messages))
    assert ("first" in parts.encoder.encode(prompt).text) == keep
