"""A run in simulated time: services lease, engines generate, workers score, shards store, a trainer trains.

The admission of groups is the ledger's own function. Shards share one admission here, and a router is never wrong; what
is simulated is who waits for whom. A group that is too stale for the next step is dropped, and its place is free again.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from dataclasses import dataclass

import msgspec
import numpy as np
import simpy

from services.buffer.ledger.admission import oldest_trainable, slots_left
from services.buffer.ledger.stream import StreamConfig, StreamState
from tests.bench.scaling.costs import Costs
from tests.bench.scaling.layout import Demand, Layout, Workload, groups_per_step
from tests.bench.scaling.station import Engines, Station

Steps = Generator[simpy.Event, object, None]


@dataclass(frozen=True)
class Usage:
    """Seconds, tokens and groups up to one moment; the difference of two is what happened between them."""

    now: float
    tokens: float
    training: float
    publishing: float
    standstill: float
    buffer: float
    reward: float
    services: float
    expired: float

    def since(self, then: Usage) -> Usage:
        return Usage(*(new - old for new, old in zip(self.values(), then.values(), strict=True)))

    def values(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


@dataclass(frozen=True)
class Report:
    """Shares of the time after the warm-up."""

    steps_per_hour: float
    samples_per_second: float
    engines: float
    """Tokens, of what engines generate that always have all that may be in flight."""
    trainer: float
    buffer: float
    reward: float
    services: float
    publication: float
    """The trainer publishes and does not train."""
    standstill: float
    expired: float
    """Groups that were too stale, of those that were put."""
    most_staleness: int
    most_admitted: float
    """Groups admitted, of what the rule allows at that moment; at most 1."""

    @property
    def first(self) -> str:
        """The part that is busiest of those that can be had in numbers."""
        shares = {
            "buffer": self.buffer,
            "reward": self.reward,
            "services": self.services,
            "publication": self.publication,
        }
        return max(shares, key=lambda name: shares[name])


@dataclass
class _Group:
    version: int
    tokens: float


class Run:
    """One run; `report` simulates it."""

    def __init__(self, work: Workload, layout: Layout, costs: Costs, seed: int = 0) -> None:
        self.env = simpy.Environment()
        self._work, self._layout, self._costs = work, layout, costs
        self._demand = Demand.of(work, layout, costs)
        self._random = np.random.default_rng(seed)
        self._groups = groups_per_step(work, layout)
        self._state = StreamState(
            StreamConfig("train", work.n_samples_per_prompt, self._groups, max_staleness=work.max_staleness)
        )
        self._leased = 0
        self._ready: list[tuple[int, _Group]] = []
        self._next_seq = 0
        self._batch: list[_Group] = []
        self._ahead: simpy.Event | None = None
        self._changed = self.env.event()
        self._shards = [Station(self.env) for _ in range(layout.num_shards)]
        self._reward = Station(self.env, layout.reward_workers)
        self._services = [Station(self.env) for _ in range(layout.num_services)]
        gpus = layout.engine_gpus / layout.num_services
        self._engines = [Engines(self.env, gpus, costs) for _ in range(layout.num_services)]
        self._training = self._publishing = self._standstill = 0.0
        self._expired = 0
        self._most_staleness = 0
        self._most_admitted = 0.0

    def report(self, warm_steps: int, num_steps: int) -> Report:
        """Simulates `warm_steps` and then `num_steps`, which count."""
        for service in range(self._layout.num_services):
            self.env.process(self._produce(service))
        trainer = self.env.process(self._train(warm_steps))
        self.env.run(until=trainer)
        begun = self._usage()
        self.env.run(until=self.env.process(self._train(num_steps)))
        used = self._usage().since(begun)
        layout = self._layout
        full = self._demand.engines * self._work.mean_tokens
        return Report(
            steps_per_hour=3600 * num_steps / used.now,
            samples_per_second=num_steps * self._groups * self._work.n_samples_per_prompt / used.now,
            engines=used.tokens / (full * used.now),
            trainer=used.training / used.now,
            buffer=used.buffer / (layout.num_shards * used.now),
            reward=used.reward / (layout.reward_workers * used.now),
            services=used.services / (layout.num_services * used.now),
            publication=used.publishing / used.now,
            standstill=used.standstill / used.now,
            expired=used.expired / (num_steps * self._groups + used.expired),
            most_staleness=self._most_staleness,
            most_admitted=self._most_admitted,
        )

    def _usage(self) -> Usage:
        return Usage(
            now=self.env.now,
            tokens=sum(engines.tokens_now() for engines in self._engines),
            training=self._training,
            publishing=self._publishing,
            standstill=self._standstill,
            buffer=sum(shard.done_seconds for shard in self._shards),
            reward=self._reward.done_seconds,
            services=sum(service.done_seconds for service in self._services),
            expired=self._expired,
        )

    @property
    def _num_ready(self) -> int:
        """A batch is READY until it is consumed."""
        return len(self._ready) + len(self._batch)

    def _change(self) -> None:
        changed, self._changed = self._changed, self.env.event()
        changed.succeed()

    # ── production ──

    def _produce(self, service: int) -> Steps:
        """Leases a group whenever the rule and the service have room, its fair share at a time."""
        fair = max(1, round(self._work.steps_in_flight * self._groups / self._layout.num_services))
        flying = simpy.Container(self.env, capacity=fair, init=fair)
        while True:
            yield flying.get(1)
            while not slots_left(self._state, self._leased, self._num_ready, lambda _: False):
                yield self._changed
            self._leased += 1
            admitted = self._state.step * self._groups + self._leased + self._num_ready
            versions = self._work.max_staleness + min(self._state.step, self._state.policy_version) + 1
            self._most_admitted = max(self._most_admitted, admitted / (versions * self._groups))
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            self.env.process(self._group(service, seq, flying))

    def _group(self, service: int, seq: int, flying: simpy.Container) -> Steps:
        work, costs = self._work, self._costs
        shard = self._shards[seq % len(self._shards)]
        yield shard.serve(costs.transition)
        lengths = work.lengths(self._random, work.n_samples_per_prompt)
        group = _Group(self._state.policy_version, float(lengths.sum()) + work.prompt_tokens * len(lengths))
        yield self.env.all_of([self.env.process(self._sample(service, length)) for length in lengths.tolist()])
        tokens = group.tokens / len(lengths)
        put = costs.put(tokens * work.bytes_per_token, tokens * work.column_bytes_per_token)
        yield shard.serve(len(lengths) * put)
        yield self.env.timeout(costs.group_latency)
        self._leased -= 1
        heapq.heappush(self._ready, (seq, group))
        self._change()
        yield flying.put(1)

    def _sample(self, service: int, num_tokens: float) -> Steps:
        yield self._engines[service].generate(num_tokens)
        yield self._services[service].serve(self._costs.service_per_sample)
        yield self._reward.serve(self._costs.score)

    # ── training ──

    def _train(self, num_steps: int) -> Steps:
        """The trainer's loop: a batch, its samples (fetched before if it was full early), a step, new weights."""
        for _ in range(num_steps):
            while not self._has_batch():
                yield self._changed
            self._batch = [heapq.heappop(self._ready)[1] for _ in range(self._groups)]
            yield self._ahead or self._fetch()
            self._ahead = self._fetch() if len(self._ready) >= self._groups else None
            yield from self._step()
            yield from self._publish()

    def _has_batch(self) -> bool:
        """Drops what is too stale for the next step first."""
        if len(self._ready) < self._groups:
            return False
        oldest = oldest_trainable(self._state, self._state.step) or 0
        fresh = [entry for entry in self._ready if entry[1].version >= oldest]
        if len(fresh) < len(self._ready):
            self._expired += len(self._ready) - len(fresh)
            self._ready = fresh
            heapq.heapify(self._ready)
            self._change()
        return len(self._ready) >= self._groups

    def _fetch(self) -> simpy.Event:
        """Each shard answers for its part of a step's samples, of mean size."""
        work, costs = self._work, self._costs
        each = self._groups / len(self._shards)
        out = each * work.n_samples_per_prompt * costs.out(work.payload_bytes, work.column_bytes)
        around = costs.around(each) - each * costs.transition  # the lease was one
        return self.env.all_of([shard.serve(out + around) for shard in self._shards])

    def _step(self) -> Steps:
        """One rollout step; then the ledger knows that it is consumed."""
        step, costs = self._state.step, self._costs
        self._most_staleness = max(self._most_staleness, *(step - group.version for group in self._batch), 0)
        flops = sum(group.tokens for group in self._batch) * costs.flops_per_token
        seconds = costs.step_seconds + flops / (self._layout.trainer_gpus * costs.gpu_flops)
        yield self.env.timeout(seconds)
        self._training += seconds
        self._batch = []
        self._state = msgspec.structs.replace(self._state, step=step + 1)

    def _publish(self) -> Steps:
        """Engines stand still for a part of it; the trainer waits for the whole."""
        standstill, whole = self._demand.standstill, self._demand.publication
        for engines in self._engines:
            engines.stand_still()
        yield self.env.timeout(standstill)
        for engines in self._engines:
            engines.go_on()
        yield self.env.timeout(max(whole - standstill, 0.0))
        self._standstill += standstill
        self._publishing += whole
        self._state = msgspec.structs.replace(self._state, policy_version=self._state.step)
        self._change()
