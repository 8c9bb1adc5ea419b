"""With --use-rollout-routing-replay engines say which experts every token went to, and it travels with the sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.trajectory import ROUTED_EXPERTS
from services.rollout.engine import arguments
from services.rollout.engine.api import NOTHING_YET, SamplingParams
from services.rollout.engine.arguments import Machine
from services.rollout.engine.client import EngineClient
from services.rollout.fleet_build import engine_options
from services.rollout.production.generator import Generator
from services.rollout.production.partial import generation_of
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import EngineSampler, SampleRequest
from tests.support.fakes.fake_fleet import FakeFleet
from tests.support.models.tiny_model import make_tiny_tokenizer
from tests.unit.rollout.engine.test_arguments import FLAGS, job

PARAMS = SamplingParams(max_new_tokens=40)


async def test_a_sample_has_a_row_for_every_token_but_its_last(fakes: FakeFleet, tmp_path: Path) -> None:
    async with EngineClient(fakes.fleet.engines[0].url, routed_experts=True) as client:
        sample = await _sampler(fakes, client, tmp_path, num_layers=2).sample(_request(tmp_path))
    column = sample.columns[ROUTED_EXPERTS]
    assert (column.dtype, column.shape) == (np.int16, (len(sample.tokens) - 1, 2, 1))
    assert column[:, 0, 0].tolist() == (sample.tokens[:-1] % 4).tolist()


async def test_what_was_made_before_a_break_keeps_its_experts(fakes: FakeFleet, tmp_path: Path) -> None:
    engine = fakes.fleet.engines[0]
    async with EngineClient(engine.url, routed_experts=True) as client:
        prompt = _request(tmp_path).prompt.tokens
        done, changed_at = NOTHING_YET, 0
        async for piece in Generator(client, fakes.fleet.weights).stream(prompt, PARAMS, request_id="r", seconds=20):
            done = piece
            if len(piece.tokens) == 5 and not changed_at:
                await engine.client.pause("abort")
                await fakes.name_weights(0, 1)
                await engine.client.resume()
                changed_at = 5
    numbers = np.frombuffer(done.routed_experts or b"", dtype="<i4").reshape(-1, 2)
    tokens = np.asarray([*prompt, *done.tokens])[:-1]
    assert numbers[:, 0].tolist() == (tokens % 4).tolist()
    first, second = done.policy_ranges
    assert (first.policy_version, second.policy_version) == (0, 1)
    rows_before = len(prompt) + first.end - 1  # an engine has not routed the token that it said last
    versions = np.arange(len(tokens)) >= rows_before
    assert numbers[:, 1].tolist() == ((tokens + versions) % 4).tolist()


async def test_a_sample_that_is_continued_later_brings_its_experts_along(fakes: FakeFleet, tmp_path: Path) -> None:
    async with EngineClient(fakes.fleet.engines[0].url, routed_experts=True) as client:
        sample = await _sampler(fakes, client, tmp_path, num_layers=2).sample(_request(tmp_path))
    flat = np.frombuffer(generation_of(sample).routed_experts or b"", dtype="<i4")
    assert flat.tolist() == sample.columns[ROUTED_EXPERTS].reshape(-1).tolist()


async def test_nobody_asks_for_them_otherwise(fakes: FakeFleet, tmp_path: Path) -> None:
    async with EngineClient(fakes.fleet.engines[0].url) as client:
        assert not (await _sampler(fakes, client, tmp_path, num_layers=None).sample(_request(tmp_path))).columns


def test_engines_are_started_so_that_they_know() -> None:
    machine = Machine(has_accelerator=True, flags=FLAGS | {"enable_return_routed_experts": ("--experts", False)})
    replaying = job().model_copy(update={"train": job().train.model_copy(update={"use_rollout_routing_replay": True})})
    assert "--experts" in arguments.words(engine_options(replaying), machine, engine=0, port=5)
    assert "--experts" not in arguments.words(engine_options(job()), machine, engine=0, port=5)
    on_cpu = Machine(has_accelerator=False, flags=machine.flags)
    assert "--experts" in arguments.words(engine_options(replaying), on_cpu, engine=0, port=5)
    with pytest.raises(ConfigError, match="set use_rollout_routing_replay instead"):
        arguments.check({"enable_return_routed_experts": True}, machine)


def _sampler(fakes: FakeFleet, client: EngineClient, folder: Path, *, num_layers: int | None) -> EngineSampler:
    return EngineSampler(Generator(client, fakes.fleet.weights), _encoder(folder), seconds=20, num_layers=num_layers)


def _request(folder: Path) -> SampleRequest:
    return SampleRequest("s", "g", 0, _encoder(folder).encode_plain("one two"), None, {}, PARAMS)


def _encoder(folder: Path) -> PromptEncoder:
    make_tiny_tokenizer().save_pretrained(folder / "tokenizer")
    return PromptEncoder(folder / "tokenizer", apply_chat_template=False)
