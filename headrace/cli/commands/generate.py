"""`headrace generate TEXT`: asks the policy that the engines serve now; the text is printed as it is generated."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from headrace.api.rollout.v1 import rollout_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.runs import add_run_argument, address_of
from headrace.cli.words import count, temperature, text
from headrace.client.open import open_rollout
from headrace.limits import MAX_SCHEMA_BYTES


def generate(argv: Sequence[str]) -> int:
    """Prints the response, then the policy versions that sampled it."""
    parser = argparse.ArgumentParser(prog="headrace generate")
    parser.add_argument("text", type=text, help="the user's message")
    add_run_argument(parser)
    parser.add_argument("--rollout-address", help="host:port of the rollout service, instead of a run")
    parser.add_argument("--temperature", type=temperature, default=0.0)
    parser.add_argument("--max-new-tokens", type=count, default=256)
    parser.add_argument("-n", type=count, default=1, help="responses; several are printed as they end")
    parser.add_argument(
        "--stop", type=text, action="append", default=[], help="ends a response, which holds it; repeatable"
    )
    parser.add_argument("--json-schema", type=schema, metavar="FILE", help="a JSON schema that the response must fit")
    parser.add_argument("--regex", type=text, help="a regular expression that the response must fit as a whole")
    parser.add_argument("--raw", action="store_true", help="give the text to the tokenizer without the chat template")
    args = parser.parse_intermixed_args(argv)
    sampling = sample_pb2.SamplingParams(
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop,
        json_schema=args.json_schema,
        regex=args.regex,
    )
    request = rollout_pb2.GenerateRequest(sampling=sampling, n=args.n)
    if args.raw:
        request.text = args.text
    else:
        request.messages.messages.append(sample_pb2.ChatMessage(role="user", content=args.text))
    asyncio.run(_generate(address_of(args.run, "rollout", args.rollout_address), request))
    return 0


def schema(path: str) -> str:
    """Reads a file of a JSON schema."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_SCHEMA_BYTES + 1)
        if len(content) > MAX_SCHEMA_BYTES:
            raise ValueError(f"it has more than {MAX_SCHEMA_BYTES} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path[:80]}: {error}") from None


async def _generate(address: str, request: rollout_pb2.GenerateRequest) -> None:
    versions: set[int] = set()
    texts: dict[int, str] = {}
    async with open_rollout(address) as rollout:
        async for reply in rollout.generate(request):
            texts[reply.index] = texts.get(reply.index, "") + reply.text
            if request.n == 1:
                print(reply.text, end="", flush=True)
            elif reply.status:
                print(f"── {reply.index + 1} of {request.n}\n{texts[reply.index]}", flush=True)
            versions |= {each.policy_version for each in reply.policy_ranges}
    print(f"\n(policy version {', '.join(str(version) for version in sorted(versions)) or 'unknown'})")
