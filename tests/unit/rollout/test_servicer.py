"""Generate over gRPC, as any client sees it, on a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.client.rollout import RolloutClient
from headrace.errors import InvalidArgument
from headrace.trajectory import pack_column, unpack_column
from services.rollout.admission import EngineSlots, Kind, Shares
from services.rollout.engine.api import Generation, SamplingParams
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import merged_params
from services.rollout.server import RolloutServicer
from tests.support.fakes.fake_engine import response_to
from tests.support.fakes.fake_fleet import FakeFleet, served_rollout
from tests.support.models.tiny_model import make_tiny_tokenizer


@asynccontextmanager
async def served(fakes: FakeFleet, folder: Path) -> AsyncIterator[tuple[RolloutClient, PromptEncoder, list[int]]]:
    """A client, the service's encoder, and the seeds that engines were asked with."""
    make_tiny_tokenizer().save_pretrained(folder)
    encoder = PromptEncoder(folder, apply_chat_template=False)
    generator, seeds = Generator(fakes.fleet.engines[0].client, fakes.fleet.weights), list[int]()

    def ask(prompt: EncodedPrompt, sampling: sample_pb2.SamplingParams, begun: Generation, adapter: str) -> Any:
        params = merged_params(sampling, SamplingParams(max_new_tokens=9))
        seeds.append(params.seed or 0)
        return generator.stream(prompt.tokens, params, request_id=f"r{len(seeds)}", seconds=20, begun=begun)

    slots = EngineSlots(Shares({Kind.CLIENTS: 3}), max_waiting=126)
    parts = cast(Any, SimpleNamespace(encoder=encoder, ask=ask, slots=slots, adapter=nullcontext))
    async with served_rollout(RolloutServicer(parts)) as address, RolloutClient(address) as client:
        yield client, encoder, seeds


async def test_pieces_put_together_are_the_whole_response(fakes: FakeFleet, tmp_path: Path) -> None:
    async with served(fakes, tmp_path) as (client, encoder, _):
        request = rollout_pb2.GenerateRequest(
            text="hé", return_tokens=True, sampling=sample_pb2.SamplingParams(max_new_tokens=30)
        )
        replies = [reply async for reply in client.generate(request)]
    prompt = encoder.encode_text("hé").tokens
    tokens = [int(token) for reply in replies for token in unpack_column(reply.tokens)]
    assert tokens == response_to(prompt, 30)
    assert "".join(reply.text for reply in replies) == encoder.decode(tokens)
    assert sum(len(unpack_column(reply.log_probs)) for reply in replies) == 30
    assert [reply.status for reply in replies[:-1]] == [0] * (len(replies) - 1)
    assert replies[-1].status == sample_pb2.SAMPLE_STATUS_TRUNCATED
    assert (replies[-1].prompt_tokens, replies[-1].policy_ranges[0].end) == (len(prompt), 30)


async def test_a_response_that_is_begun_goes_on_after_its_tokens(fakes: FakeFleet, tmp_path: Path) -> None:
    async with served(fakes, tmp_path) as (client, encoder, _):
        whole = response_to(encoder.encode_text("hé").tokens, 30)
        request = rollout_pb2.GenerateRequest(
            text="hé", return_tokens=True, sampling=sample_pb2.SamplingParams(max_new_tokens=30)
        )
        request.begun.CopyFrom(pack_column("tokens", np.array(whole[:12], np.int32)))
        replies = [reply async for reply in client.generate(request)]
        several, constrained, unknown = (rollout_pb2.GenerateRequest() for _ in range(3))
        for bad in (several, constrained, unknown):
            bad.CopyFrom(request)
        several.n = 2
        constrained.sampling.regex = "a*"
        unknown.begun.CopyFrom(pack_column("tokens", np.array([1 << 30], np.int32)))
        for bad, said in ((several, "begun is one"), (constrained, "begun is one"), (unknown, "begun")):
            with pytest.raises(InvalidArgument, match=said):
                [reply async for reply in client.generate(bad)]
    assert [int(token) for reply in replies for token in unpack_column(reply.tokens)] == whole[12:]
    assert encoder.decode(whole).endswith("".join(reply.text for reply in replies))
    assert (replies[-1].policy_ranges[0].start, replies[-1].policy_ranges[-1].end) == (12, 30)


async def test_several_responses_come_side_by_side_each_with_its_own_seed_and_end(
    fakes: FakeFleet, tmp_path: Path
) -> None:
    sampling = sample_pb2.SamplingParams(max_new_tokens=8, seed=5)
    async with served(fakes, tmp_path) as (client, encoder, seeds):
        request = rollout_pb2.GenerateRequest(text="hé", return_tokens=True, sampling=sampling, n=3)
        replies = [reply async for reply in client.generate(request)]
        for wrong, said in ((129, "n has 129"), (4_000_000_000, "n has 4000000000")):
            with pytest.raises(InvalidArgument, match=said):
                [reply async for reply in client.generate(rollout_pb2.GenerateRequest(text="h", n=wrong))]
    assert sorted(seeds) == [5, 6, 7]
    expected = response_to(encoder.encode_text("hé").tokens, 8)
    for index in range(3):
        own = [reply for reply in replies if reply.index == index]
        assert [int(token) for reply in own for token in unpack_column(reply.tokens)] == expected
        assert [bool(reply.status) for reply in own] == [False] * (len(own) - 1) + [True]
