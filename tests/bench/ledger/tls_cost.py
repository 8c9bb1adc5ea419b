"""What certificates and tokens cost: puts and fetches in clear, encrypted, and encrypted with a token, in turn.

`python -m tests.bench.ledger.tls_cost`: three durable buffers, a process each, and one client that asks them in turn,
in each round with groups of its own. Random bytes, calls of 16 samples, 16 in flight, on uvloop. A ratio is the median
of the rounds' ratios to the round in clear beside it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from headrace.cli.authority import issue_client, issue_service
from headrace.client.buffer import BufferClient
from headrace.job.schema.services import BufferSection
from headrace.rpc import client as rpc_client
from headrace.rpc.access import add_token
from headrace.rpc.roles import Role
from headrace.rpc.tls import VARIABLE
from tests.bench.cpu import cpu_seconds
from tests.bench.ledger_throughput import PER_CALL, PER_GROUP, leased, put_of, together
from tests.support.processes.buffer_server import BufferProcess

NUM_SAMPLES = {18_000: 4_096, 147_000: 1_024}
"""Of a round, by bytes a sample."""
ROUNDS = 5
CLEAR, TLS, TOKEN = "in clear", "certificates", "certificates and a token"


@dataclass(frozen=True)
class Round:
    """Samples a second, and seconds of client and server for one sample."""

    put: float
    put_cpu: float
    fetch: float
    fetch_cpu: float


@dataclass(frozen=True)
class Peer:
    """A buffer and the client that meets it in one way."""

    client: BufferClient
    pid: int


async def measured(peer: Peer, stream: str, size: int, num_samples: int) -> Round:
    """One round: the samples are put, then fetched."""
    puts = [put_of(lease, size) for lease in await leased(peer.client, stream, num_samples // PER_GROUP)]
    calls = [puts[first : first + PER_CALL // PER_GROUP] for first in range(0, len(puts), PER_CALL // PER_GROUP)]
    ids = [[sample.envelope.sample_id for put in call for sample in put.samples] for call in calls]

    async def put(number: int) -> None:
        assert not any(result.HasField("refused") for result in await peer.client.put_groups(calls[number]))

    async def fetch(number: int) -> None:
        assert len(await peer.client.fetch_samples(stream, ids[number])) == PER_CALL

    before = cpu_seconds(peer.pid)
    put_seconds = await together(len(calls), put)
    between = cpu_seconds(peer.pid)
    fetch_seconds = await together(len(calls), fetch)
    after = cpu_seconds(peer.pid)
    return Round(
        num_samples / put_seconds,
        (between - before) / num_samples,
        num_samples / fetch_seconds,
        (after - between) / num_samples,
    )


@asynccontextmanager
async def peers(folder: Path) -> AsyncIterator[Mapping[str, Peer]]:
    """By how they meet."""
    issue_service(folder / "tls", (), 1)
    client = issue_client(folder / "tls", "bench", Role.ADMIN, 1).folder
    tokens = folder / "tokens.json"
    token = add_token(tokens, "bench", Role.ADMIN)
    encrypted = ("--tls-dir", str(folder / "tls"))
    ways: Sequence[tuple[str, Sequence[str], Mapping[str, str]]] = (
        (CLEAR, (), {}),
        (TLS, encrypted, {VARIABLE: str(client)}),
        (TOKEN, (*encrypted, "--tokens-file", str(tokens)), {VARIABLE: str(client), rpc_client.VARIABLE: token}),
    )
    async with AsyncExitStack() as stack:
        buffers = []
        for number, (_, arguments, _) in enumerate(ways):
            (folder / str(number)).mkdir()
            buffers.append(BufferProcess(folder / str(number), None, buffer=BufferSection(max_staleness=0)))
            await buffers[-1].start(arguments=arguments)
            stack.push_async_callback(buffers[-1].kill)
        found = {}
        for (name, _, environment), buffer in zip(ways, buffers, strict=True):
            with _environment(environment):
                found[name] = Peer(await stack.enter_async_context(BufferClient(buffer.address)), buffer.pid)
        yield found


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def report(size: int, rounds: Mapping[str, Sequence[Round]]) -> str:
    """Rates in clear, and ratios to them."""
    lines = [f"{size / 1000:g} KB a sample (median of {len(rounds[CLEAR])} rounds)"]
    for name, found in rounds.items():
        cells = []
        for what in ("put", "fetch"):
            rate, cpu = (statistics.median(getattr(one, field) for one in found) for field in (what, f"{what}_cpu"))
            of_rate, of_cpu = (ratio(found, rounds[CLEAR], field) for field in (what, f"{what}_cpu"))
            cells.append(f"{what} {rate:6.0f} a second {of_rate:.2f}×, CPU {1e6 * cpu:5.0f} µs a sample {of_cpu:.2f}×")
        lines.append(f"  {name:<26}{';   '.join(cells)}")
    return "\n".join(lines)


def ratio(own: Sequence[Round], clear: Sequence[Round], field: str) -> float:
    """The median over pairs of rounds."""
    return statistics.median(getattr(a, field) / getattr(b, field) for a, b in zip(own, clear, strict=True))


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=Path.cwd()) as folder:
        async with peers(Path(folder)) as found:
            for size, num_samples in NUM_SAMPLES.items():
                rounds: dict[str, list[Round]] = {name: [] for name in found}
                for number in range(ROUNDS):
                    for name, peer in found.items():
                        stream = f"bench/{size}/{number}"
                        rounds[name].append(await measured(peer, stream, size, num_samples))
                print(report(size, rounds), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
