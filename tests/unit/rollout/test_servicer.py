"""Generate over gRPC, as any client sees it, on a fake engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.client.rollout import RolloutClient
from headrace.rpc.server import RpcServer, Service
from headrace.trajectory import unpack_column
from services.rollout.engine.api import SamplingParams
from services.rollout.production.generator import Generator
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder
from services.rollout.production.sampling import merged_params
from services.rollout.servicer import RolloutServicer
from tests.support.fakes.fake_engine import response_to
from tests.support.fakes.fake_fleet import FakeFleet
from tests.support.models.tiny_model import make_tiny_tokenizer


async def test_pieces_put_together_are_the_whole_response(fakes: FakeFleet, tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    encoder = PromptEncoder(tmp_path, apply_chat_template=False)
    generator = Generator(fakes.fleet.engines[0].client, fakes.fleet.weights)

    def ask(prompt: EncodedPrompt, sampling: sample_pb2.SamplingParams) -> Any:
        params = merged_params(sampling, SamplingParams(max_new_tokens=9))
        return generator.stream(prompt.tokens, params, request_id="r", seconds=20)

    parts = cast(Any, SimpleNamespace(encoder=encoder, ask=ask))
    name = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
    server = RpcServer(
        "rollout",
        "127.0.0.1:0",
        [Service(RolloutServicer(parts), rollout_pb2_grpc.add_RolloutServiceServicer_to_server, name)],
    )
    await server.start()
    async with RolloutClient(server.address) as client:
        request = rollout_pb2.GenerateRequest(
            text="hé", return_tokens=True, sampling=sample_pb2.SamplingParams(max_new_tokens=30)
        )
        replies = [reply async for reply in client.generate(request)]
    await server.stop(0.1)
    prompt = encoder.encode_text("hé").tokens
    tokens = [int(token) for reply in replies for token in unpack_column(reply.tokens)]
    assert tokens == response_to(prompt, 30)
    assert "".join(reply.text for reply in replies) == encoder.decode(tokens)
    assert sum(len(unpack_column(reply.log_probs)) for reply in replies) == 30
    assert [reply.status for reply in replies[:-1]] == [0] * (len(replies) - 1)
    assert replies[-1].status == sample_pb2.SAMPLE_STATUS_TRUNCATED
    assert (replies[-1].prompt_tokens, replies[-1].policy_ranges[0].end) == (len(prompt), 30)
