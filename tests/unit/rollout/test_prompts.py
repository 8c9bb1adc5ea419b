"""Prompts reach the model as they were meant, or are refused with the way out: roles, contents, templates."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from headrace.api.sample.v1 import sample_pb2
from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.kit.conversation import renderer_of
from headrace.job.schema.training import TrainSection
from headrace.prompts import chat_message
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.supervised import supervised_parts
from tests.support.models.chat_templates import CHAT_MODELS, make_chat_tokenizer

NAMES = sorted(CHAT_MODELS)
SAID = "Say 'x<y' & 42."


@functools.cache
def encoder(name: str) -> PromptEncoder:
    folder = Path(tempfile.mkdtemp())
    make_chat_tokenizer(name).save_pretrained(folder)
    return PromptEncoder(folder, apply_chat_template=False)


def asked(name: str, *messages: dict[str, Any]) -> str:
    """The text that the model is asked, or the refusal."""
    prompt = sample_pb2.Prompt(
        prompt_id="p", messages=sample_pb2.ChatMessages(messages=[chat_message(message) for message in messages])
    )
    try:
        return encoder(name).encode(prompt).text
    except InvalidArgument as error:
        return f"refused: {error.message}"


@pytest.mark.parametrize("name", NAMES)
def test_text_in_parts_is_one_text(name: str) -> None:
    well = {"role": "user", "content": "Well?"}
    for parts in ([{"type": "text", "text": SAID[:7]}, {"type": "input_text", "text": SAID[7:]}], [SAID]):
        for role in ("user", "system"):
            as_text = asked(name, {"role": role, "content": SAID}, well)
            assert asked(name, {"role": role, "content": parts}, well) == as_text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["human", "developer", "function", "Users"])
def test_no_role_vanishes(name: str, role: str) -> None:
    for messages in (
        [{"role": role, "content": SAID}],
        [{"role": role, "content": SAID}, {"role": "user", "content": "Well?"}],
        [{"role": "user", "content": SAID}, {"role": role, "content": SAID}],  # the same text is there, once
        [{"role": "user", "content": "Well?"}, {"role": role, "content": "e"}],  # it is in other words, too
    ):
        text = asked(name, *messages)
        if not text.startswith("refused: "):
            assert text.count(SAID) == sum(message["content"] == SAID for message in messages)
            assert messages[-1]["content"] != "e" or re.search(r'[>\n]"?e"?(<| You |$)', text), text
        else:
            # a template that knows no developer is given a system message
            assert repr(role) in text or "template refused" in text or (role == "developer" and "'system'" in text)


@pytest.mark.parametrize(
    ("value", "thinks"), [({}, True), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)]
)
def test_the_chat_template_is_given_the_jobs_variables(tmp_path: Path, value: dict[str, bool], thinks: bool) -> None:
    make_chat_tokenizer("qwen3").save_pretrained(tmp_path)
    encoder = PromptEncoder(tmp_path, apply_chat_template=True, variables=value)
    encoder.load()
    asks_for_no_thought = encoder.encode_text("hello").text.endswith("<think>\n\n</think>\n\n")
    assert asks_for_no_thought == (not thinks)
    kit = renderer_of(HookArgs({"hf_checkpoint": tmp_path, "apply_chat_template_kwargs": value}))
    rendered = kit.render([{"role": "user", "content": "hello"}], None)
    assert kit.tokens_of_rendered(rendered) == encoder.encode_text("hello").tokens


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"enable_thinkin": False}, "never reads enable_thinkin.*did you mean enable_thinking"),
        ({"messages": []}, "messages comes from the prompt: leave it out"),
    ],
)
def test_variables_that_the_chat_template_does_not_read_are_refused(
    tmp_path: Path, value: dict[str, Any], said: str
) -> None:
    make_chat_tokenizer("qwen3").save_pretrained(tmp_path)
    supervised = supervised_parts(TrainSection(loss_mask_type="qwen3"), tmp_path, value)
    assert supervised is not None
    for encoder in (PromptEncoder(tmp_path, apply_chat_template=True, variables=value), supervised.encoder):
        with pytest.raises(ConfigError, match=said):
            encoder.load()
