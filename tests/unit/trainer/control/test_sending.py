"""Sending is a pipe: buckets are gathered while those before them are on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist

from headrace.publication import TensorSpec
from services.trainer.control.senders import StageGroup, WeightSender, part_of
from services.trainer.megatron.parallel import Layout
from services.trainer.model.policy import Policy
from tests.support.fakes.engine_checksums import engine_checksums

MEGABYTES = 48  # of a tensor: far more than sockets hold
SECONDS = 60.0


class WatchedPolicy:
    """Three tensors; `gathered[n]` is set when a sender asks for tensor n."""

    def __init__(self) -> None:
        self.weights = {f"t{n}": torch.full((MEGABYTES << 18,), float(n)) for n in range(3)}
        self.gathered = [threading.Event() for _ in self.weights]

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for event, item in zip(self.gathered, self.weights.items(), strict=True):
            event.set()
            yield item

    def hf_tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in self.weights.items()]


def receive_late(opened: StageGroup, policy: WatchedPolicy) -> list[torch.Tensor]:
    """As an engine, but each bucket only once the sender gathers the next one."""
    buckets, received = receive(opened, len(policy.weights)), []
    for following in [*policy.gathered[1:], None]:
        assert following is None or following.wait(SECONDS), "the sender waits for this bucket first"
        received.append(next(buckets))
    return received


def joined(opened: StageGroup, rank: int = 1, world_size: int = 2) -> dist.ProcessGroupGloo:
    store = dist.TCPStore(opened.host, opened.port, world_size, False, timedelta(seconds=SECONDS))
    prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{opened.name}/", dist.PrefixStore(opened.name, store)))
    return dist.ProcessGroupGloo(prefixed, rank, world_size, timedelta(seconds=SECONDS))


def receive(opened: StageGroup, num_buckets: int) -> Iterator[torch.Tensor]:
    """As an engine, one bucket after the other."""
    group = joined(opened)
    for _ in range(num_buckets):
        received = torch.empty(MEGABYTES << 20, dtype=torch.uint8)
        group.broadcast([received], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]  # torch leaves it out
        yield received


class StagePolicy:
    """The tensors of one pipeline stage."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def hf_tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in self.weights.items()]


def sender_of(
    policy: WatchedPolicy | StagePolicy, is_aborted: Callable[[str], bool] = lambda _: False, stage: int = 0
) -> WeightSender:
    layout = SimpleNamespace(device=torch.device("cpu"), pp_rank=stage, tp_rank=0, dp_rank=0)
    return WeightSender(
        cast(Policy, policy),
        cast(Layout, layout),
        is_aborted,
        host="127.0.0.1",
        bucket_bytes=MEGABYTES << 20,
        timeout_seconds=SECONDS,
    )


def test_weights_that_were_kept_are_sent_as_they_were_after_the_model_has_others() -> None:
    policy = WatchedPolicy()
    sender = sender_of(policy)
    for _ in range(2):
        sender.keep()
        kept = {name: tensor.clone() for name, tensor in policy.weights.items()}
        for tensor in policy.weights.values():
            tensor += 1.0
    opened = sender.open(0)
    assert opened is not None
    with ThreadPoolExecutor(1) as engine:
        receiving = engine.submit(receive_late, opened, policy)
        sent = sender.send("p", {0: 2}, kept=True)
        received = receiving.result()
    sender.drop([0])
    assert sent is not None
    assert sent.checksums == engine_checksums(kept)
    assert all(torch.equal(a.view(torch.float32), b) for a, b in zip(received, kept.values(), strict=True))


def test_a_group_that_is_given_up_does_not_keep_the_others_from_their_buckets() -> None:
    """The engine of service 0 joins and receives nothing; the first buckets of service 1 are sent beside it."""
    policy, given_up = WatchedPolicy(), set[str]()
    sender = sender_of(policy, given_up.__contains__)
    opened = [sender.open(service) for service in (0, 1)]
    assert opened[0] is not None
    assert opened[1] is not None
    with ThreadPoolExecutor(2) as threads:
        absent = threads.submit(joined, opened[0])
        sending = threads.submit(sender.send, "p", {0: 2, 1: 2})
        buckets = receive(opened[1], len(policy.weights))
        received = [next(buckets)]
        assert not sending.done()
        given_up.add(part_of("p", 0))
        received += buckets
        sent = sending.result()
        absent.result()
    sender.drop([0, 1])
    assert sent is not None
    assert sent.error is None
    assert list(sent.left) == [0]
    assert "given up while sending" in sent.left[0]
    assert sent.checksums == engine_checksums(policy.weights)
    assert all(torch.equal(a.view(torch.float32), b) for a, b in zip(received, policy.weights.values(), strict=True))


def test_stages_describe_send_and_hash_each_tensor_once_and_every_rank_of_an_engine_gets_it() -> None:
    """Layers are of one stage each, so what an engine fuses is never of two."""
    layers = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qkv"]
    names = [["model.embed_tokens.weight", *layers[:3]], [*layers[3:], "model.norm.weight"]]
    stages = [{name: torch.randn(8, 4) for name in of_stage} for of_stage in names]
    senders = [sender_of(StagePolicy(weights), stage=number) for number, weights in enumerate(stages)]
    described = [sender.describe() for sender in senders]
    assert [[spec.name for bucket in each.buckets for spec in bucket] for each in described if each] == names
    opened = [group for sender in senders if (group := sender.open(0))]

    def received(group: StageGroup, rank: int, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        flat = torch.empty(sum(each.nbytes for each in weights.values()), dtype=torch.uint8)
        joined(group, rank, 3).broadcast([flat], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]
        return flat.view(torch.float32)

    with ThreadPoolExecutor(6) as threads:
        sending = [threads.submit(sender.send, "p", {0: 3}) for sender in senders]
        ranks = [
            [threads.submit(received, group, rank, weights) for rank in (1, 2)]
            for group, weights in zip(opened, stages, strict=True)
        ]
        sent = [each.result() for each in sending]
        for of_stage, weights in zip(ranks, stages, strict=True):
            expected = torch.cat([weight.flatten() for weight in weights.values()])
            assert all(rank.result().equal(expected) for rank in of_stage)
    for sender in senders:
        sender.drop([0])
    checksums = [each.checksums for each in sent if each]
    assert not checksums[0].keys() & checksums[1].keys()
    assert checksums[0] | checksums[1] == engine_checksums(stages[0] | stages[1])
