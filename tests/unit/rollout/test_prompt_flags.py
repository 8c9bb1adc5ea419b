"""Flags of prompts act on what a job builds: --apply-chat-template, its kwargs, --keep-earlier-thoughts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headrace.errors import ConfigError
from headrace.hooks.args import HookArgs
from headrace.hooks.kit.conversation import renderer_of
from headrace.job.schema.job import Job
from headrace.job.schema.training import TrainSection
from headrace.sample_log import Answer
from services.rollout.build import rollout_service
from services.rollout.engine.api import SamplingParams
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import SampleRequest
from services.rollout.production.supervised import supervised_parts
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3


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
        ({"tokenize": True}, "never reads tokenize; it reads enable_thinking"),
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


FUNCTION = """
from pathlib import Path

from headrace.hooks import Sample
from headrace.models.tokenizer.tokenizer import load_tokenizer

tokenizers = []

async def generate(args, sample, sampling_params):
    tokenizers or tokenizers.append(load_tokenizer(Path(args.hf_checkpoint), trust_remote_code=False))
    before, role, inside = sample.label.split("|")
    text = before + sample.prompt
    if role:
        messages = [{"role": "system", "content": "Be brief."}] * (role == "both")
        messages.append({"role": "user", "content": inside + text})
        text = tokenizers[0].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizers[0].encode(text, add_special_tokens=False)
    answer = tokenizers[0].encode("4", add_special_tokens=False)
    sample.tokens, sample.response, sample.response_length = prompt + answer, "4", len(answer)
    sample.rollout_log_probs, sample.status = [-0.5] * len(answer), Sample.Status.COMPLETED
    return sample
"""


@pytest.mark.parametrize(
    ("applies", "forms", "num_warnings"),
    [
        (True, ["|user|", "|both|", "|user|Question: "], 1),
        (True, ["||", "An example. ||"], 0),
        (False, ["|user|", "|both|", "||"], 0),
    ],
)
async def test_a_function_that_applies_the_chat_template_again_is_told_once_and_samples_show_what_was_asked(
    tmp_path: Path, applies: bool, forms: list[str], num_warnings: int
) -> None:
    model = tmp_path / "model"
    make_tiny_qwen3(model)
    tokenizer = make_chat_tokenizer("qwen3")
    tokenizer.save_pretrained(model)
    (tmp_path / "hook.py").write_text(FUNCTION)
    job = Job.model_validate(
        {
            "model": {"hf_checkpoint": model},
            "data": {"apply_chat_template": applies},
            "rollout": {"custom_generate_function_path": f"{tmp_path / 'hook.py'}:generate"},
            "services": {"buffer_address": "127.0.0.1:1", "reward_address": "127.0.0.1:2"},
        }
    )
    service = rollout_service(job, lambda number: FakeEngine(WIRE), tmp_path, CollectorRegistry())
    sampler: Any = service.parts.sampler
    try:
        await sampler.start()
        prompt = service.parts.encoder.encode_text("2 + 2?")
        requests = [
            SampleRequest(f"s{number}", "g", number, prompt, form, {}, SamplingParams(4))
            for number, form in enumerate(forms)
        ]
        made = await sampler.sample_all(requests, evaluation=False)
    finally:
        await sampler.close()
        await service.stop()
    assert [Answer.of(sample).prompt for sample in made] == [
        tokenizer.decode(sample.tokens[:-1].tolist()) for sample in made
    ]
    warnings = [warning for warning in service.parts.warnings if "Leave --apply-chat-template out" in warning]
    assert len(warnings) == num_warnings
