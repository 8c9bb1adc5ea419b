"""`headrace generate TEXT`: asks the policy that the engines serve now; words come as they are made."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.runs import add_run_argument, address_of
from headrace.cli.words import count, temperature, text
from headrace.rpc.call import stream
from headrace.rpc.channel import connect

_DEADLINE_SECONDS = 600.0


def generate(argv: Sequence[str]) -> int:
    """Prints the answer, then which weights made it."""
    parser = argparse.ArgumentParser(prog="headrace generate")
    parser.add_argument("text", type=text, help="one user turn")
    add_run_argument(parser)
    parser.add_argument("--rollout-address", help="instead of a run")
    parser.add_argument("--temperature", type=temperature, default=0.0)
    parser.add_argument("--max-new-tokens", type=count, default=256)
    parser.add_argument("--raw", action="store_true", help="give the text to the tokenizer without the chat template")
    args = parser.parse_intermixed_args(argv)
    sampling = sample_pb2.SamplingParams(temperature=args.temperature, max_new_tokens=args.max_new_tokens)
    request = rollout_pb2.GenerateRequest(sampling=sampling)
    if args.raw:
        request.text = args.text
    else:
        request.messages.messages.append(sample_pb2.ChatMessage(role="user", content=args.text))
    asyncio.run(_generate(address_of(args.run, "rollout", args.rollout_address), request))
    return 0


async def _generate(address: str, request: rollout_pb2.GenerateRequest) -> None:
    versions: list[int] = []
    async with connect(address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        async for reply in stream(stub.Generate, request, deadline_seconds=_DEADLINE_SECONDS):
            print(reply.text, end="", flush=True)
            versions += [each.policy_version for each in reply.policy_ranges]
    print(f"\n(policy version {', '.join(str(version) for version in versions) or 'unknown'})")
