"""The costs that the simulation is fed with; each field names its source, a document and its words or an assumption."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Measured:
    """A figure that a document reports: `quote` is in it, word for word."""

    document: str
    quote: str


@dataclass(frozen=True)
class Assumed:
    """A figure that was not measured in this project."""

    reason: str


Source = Measured | Assumed


def figure(value: Any, *sources: Source) -> Any:
    """A dataclass field with its value and its sources."""
    return field(default=value, metadata={"sources": sources})


_STORES, _SCALING, _SPEED, _LEDGER = "docs/stores.md", "docs/scaling.md", "docs/performance.md", "docs/ledger.md"


@dataclass(frozen=True)
class Costs:
    """Seconds of one server (a shard, a service's loop, a reward worker, a trainer) unless a name says otherwise."""

    put_points: tuple[tuple[float, float], ...] = figure(
        ((2_300, 64e-6), (18_000, 118e-6), (147_000, 393e-6)),
        Measured(_STORES, "| 2.3 KB | 64 |"),
        Measured(_STORES, "| 18 KB | 118 |"),
        Measured(_STORES, "| 147 KB | 393 |"),
    )
    """(bytes of a sample's payload, a shard's CPU seconds to put it), in rising order."""

    column_in_per_byte: float = figure(5.6e-9, Measured(_SCALING, "5.6 CPU seconds on a GB that comes in"))
    """CPU seconds, which threads for disk and hashes spend beside the loop."""

    out_per_byte: float = figure(1.9e-9, Measured(_SCALING, "1.9 on a GB that goes out"))

    transition: float = figure(1 / 138_000, Measured(_LEDGER, "138,000 transitions a second"))
    transitions_per_group: int = figure(5, Assumed("lease, put, batch, consume, commit"))

    batch_per_group: float = figure(
        7e-3 / 1024, Measured(_STORES, "LeaseBatch of 1,024 groups of 8 takes 7 ms of the server's CPU")
    )

    shard_cores: int = figure(2, Measured(_SCALING, "Give each shard a core or two"))
    """One event loop, with threads for the disk and hashes."""

    standstill_of_broadcast: float = figure(4.3, Measured(_SPEED, "| 538 MB (SmolLM2-135M) | 0.70–0.75 s | 3.9–4.7× |"))
    whole_of_broadcast: float = figure(6.7, Measured(_SPEED, "| 1.1 s | 6.1–7.3× |"))
    """Ratios of processes on a CPU, which hash with SHA-256; ranks on GPUs hash there, so they are rather too high."""

    link_bytes: float = figure(
        50e9, Assumed("400 Gbit/s a rank that sends; a broadcast is pipelined: as fast to many as to one")
    )
    """Bytes a second."""

    token_base: float = figure(7e-3, Assumed("one request alone on a GPU: 140 tokens a second"))
    token_each: float = figure(0.22e-3, Assumed("64 requests on a GPU: 3,000 tokens a second together"))
    """A token of each of n requests on a GPU takes token_base + n × token_each."""
    requests_per_gpu: int = figure(64, Assumed("SGLang's max_running_requests a GPU, by its cache at such lengths"))

    service_per_sample: float = figure(
        5e-3, Assumed("a rollout service's event loop: an engine's answer of half a megabyte")
    )
    group_latency: float = figure(
        0.0, Assumed("beside the work: waits of a group's calls for one another, which its place in flight is held for")
    )
    publication_seconds: tuple[float, float] | None = figure(
        None, Assumed("standstill and whole of a publication, where they do not follow from its bytes")
    )
    score: float = figure(20e-3, Assumed("a reward worker's CPU for one mathematical answer"))

    flops_per_token: float = figure(8 * 3.3e9, Assumed("6 to train and 2 for log-probs, a parameter that is active"))
    """Floating-point operations."""
    gpu_flops: float = figure(150e12, Assumed("15 % of an H100's bfloat16 peak: experts, long sequences"))
    """Floating-point operations a second of a trainer's GPU."""
    step_seconds: float = figure(1.0, Assumed("optimizer and planning, whatever the batch"))

    def put(self, payload_bytes: float, column_bytes: float) -> float:
        """Seconds of a shard for one sample; between and beyond the points a put costs as straight lines say."""
        sizes, seconds = zip(*self.put_points, strict=True)
        if payload_bytes > sizes[-1]:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            payload = seconds[-1] + slope * (payload_bytes - sizes[-1])
        else:
            payload = float(np.interp(payload_bytes, sizes, seconds))
        return payload + column_bytes * self.column_in_per_byte / self.shard_cores

    def out(self, payload_bytes: float, column_bytes: float) -> float:
        """Seconds of a shard to answer with one sample."""
        return (payload_bytes + column_bytes / self.shard_cores) * self.out_per_byte

    def around(self, num_groups: float) -> float:
        """Seconds of a shard for groups apart from their samples' bytes."""
        return num_groups * (self.transition * self.transitions_per_group + self.batch_per_group)

    def tokens_per_second(self, requests: float) -> float:
        """Of one GPU that runs so many requests."""
        return requests / (self.token_base + requests * self.token_each)
