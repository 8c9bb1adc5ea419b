"""What is trained, on how much of what: the named example of docs/scaling.md, and its arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tests.bench.scaling.costs import Costs


@dataclass(frozen=True)
class Workload:
    """Qwen3-30B-A3B in bfloat16, mathematics with long answers, routed experts replayed."""

    groups_per_gpu: float = 1.0
    """The batch grows with the GPUs: groups a step for each."""
    n_samples_per_prompt: int = 8
    max_staleness: int = 3
    prompt_tokens: int = 1_024
    median_tokens: float = 10_000
    spread: float = 0.5
    """Responses are log-normal: the standard deviation of their logarithm."""
    most_tokens: int = 31_744
    bytes_per_token: float = 12.5
    """0.4 MB of a sample of 32k tokens: docs/scaling.md."""
    column_bytes_per_token: float = 48 * 8
    """Routed experts as uint8: 8 in each of 48 layers; 0 without replay."""
    weight_bytes: float = 30.5e9 * 2
    steps_in_flight: float = 2.0
    """Groups in flight at most, in groups of a step: headrace's default."""

    def lengths(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Tokens of `count` responses: float64 [count]."""
        drawn = generator.lognormal(math.log(self.median_tokens), self.spread, count)
        return np.maximum(np.minimum(drawn, self.most_tokens), 1.0)

    @property
    def mean_tokens(self) -> float:
        """Of a response, cut at most_tokens."""
        if self.spread == 0:
            return min(self.median_tokens, self.most_tokens)
        distance = math.log(self.most_tokens / self.median_tokens) / self.spread
        below = math.exp(self.spread**2 / 2) * NormalDist().cdf(distance - self.spread)
        return self.median_tokens * below + self.most_tokens * (1 - NormalDist().cdf(distance))

    @property
    def payload_bytes(self) -> float:
        """Of a mean sample."""
        return self.bytes_per_token * (self.prompt_tokens + self.mean_tokens)

    @property
    def column_bytes(self) -> float:
        """Of a mean sample."""
        return self.column_bytes_per_token * (self.prompt_tokens + self.mean_tokens)


@dataclass(frozen=True)
class Layout:
    """How many of each; a fraction of a GPU is a share of its time."""

    num_gpus: int
    trainer_share: float = 1 / 4
    num_shards: int = 1
    num_services: int = 1
    reward_workers: int = 2
    num_senders: int = 1
    """Trainer ranks that broadcast side by side: one a pipeline stage."""

    @property
    def trainer_gpus(self) -> float:
        return self.num_gpus * self.trainer_share

    @property
    def engine_gpus(self) -> float:
        return self.num_gpus - self.trainer_gpus


@dataclass(frozen=True)
class Demand:
    """Samples a second that each part could bear if it never waited for another, and what a publication takes."""

    engines: float
    trainer: float
    buffer: float
    reward: float
    services: float
    standstill: float
    """Seconds in which no engine generates."""
    publication: float
    """Seconds until the new version is served; the trainer waits."""

    @classmethod
    def of(cls, work: Workload, layout: Layout, costs: Costs) -> Demand:
        """The closed forms."""
        tokens = work.prompt_tokens + work.mean_tokens
        broadcast = work.weight_bytes * layout.num_services / (layout.num_senders * costs.link_bytes)
        standstill, whole = costs.publication_seconds or (
            costs.standstill_of_broadcast * broadcast,
            costs.whole_of_broadcast * broadcast,
        )
        return cls(
            engines=layout.engine_gpus
            * costs.tokens_per_second(requests_on_gpu(work, layout, costs))
            / work.mean_tokens,
            trainer=layout.trainer_gpus * costs.gpu_flops / (tokens * costs.flops_per_token),
            buffer=layout.num_shards / buffer_seconds(work, costs),
            reward=layout.reward_workers / costs.score,
            services=layout.num_services / costs.service_per_sample,
            standstill=standstill,
            publication=whole,
        )

    @property
    def samples_per_second(self) -> float:
        """No queues, no publications: the least of the parts."""
        return min(self.engines, self.trainer, self.buffer, self.reward, self.services)


def buffer_seconds(work: Workload, costs: Costs) -> float:
    """A shard's time for a mean sample, in and out, and its part of its group."""
    sizes = work.payload_bytes, work.column_bytes
    return costs.put(*sizes) + costs.out(*sizes) + costs.around(1 / work.n_samples_per_prompt)


def requests_on_gpu(work: Workload, layout: Layout, costs: Costs) -> float:
    """As many as are in flight, or as an engine runs at once."""
    steps = min(work.steps_in_flight, work.max_staleness + 1)
    in_flight = steps * groups_per_step(work, layout) * work.n_samples_per_prompt
    return min(float(costs.requests_per_gpu), in_flight / layout.engine_gpus)


def groups_per_step(work: Workload, layout: Layout) -> int:
    """At least one."""
    return max(1, round(work.groups_per_gpu * layout.num_gpus))


def full_at(work: Workload, costs: Costs) -> dict[str, float]:
    """GPUs at which one shard, one service and two reward workers are always busy; engines and trainer never wait."""
    demand = Demand.of(work, layout := Layout(1_024), costs)
    a_gpu = min(demand.engines, demand.trainer) / layout.num_gpus
    return {name: getattr(demand, name) / a_gpu for name in ("buffer", "reward", "services")}


def mended(work: Workload, layout: Layout, costs: Costs, most: float = 0.7) -> Layout:
    """As many replicas as keep each shard, service and worker idle for a part of the time, and `layout`'s at least.

    They are busy for `most` of the time where engines or trainer never wait. Each service has a rank that sends to it.
    """
    demand = Demand.of(work, layout, costs)
    rate = min(demand.engines, demand.trainer) / most
    services = max(layout.num_services, math.ceil(rate * costs.service_per_sample))
    return Layout(
        layout.num_gpus,
        layout.trainer_share,
        num_shards=max(layout.num_shards, math.ceil(rate * buffer_seconds(work, costs))),
        num_services=services,
        reward_workers=max(layout.reward_workers, math.ceil(rate * costs.score)),
        num_senders=max(layout.num_senders, services),
    )
