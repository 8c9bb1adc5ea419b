"""Publications as a job asks for them: what ranks send, what rollout is asked, and what engines have loaded already."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.cli.main import main
from headrace.client.rollout import RolloutClient
from headrace.errors import ChecksumMismatch, ConfigError, Unavailable
from headrace.job.schema.job import Job
from headrace.job.schema.run import PublishSection
from headrace.publication import Probe, TensorSpec
from headrace.run_folder import RunFolder
from services.trainer.control.build import TrainerBuild
from services.trainer.control.channel import Channel
from services.trainer.control.publication import Publisher
from services.trainer.control.ranks import RankGroup
from services.trainer.control.senders import Sender, Sent, StageGroup, StageWeights
from services.trainer.control.transport import CollectiveTransport, LoadedFirst, transport_of
from services.trainer.gpu_sharing import OwnDevices
from services.trainer.megatron.parallel import Layout
from services.trainer.model.policy import Policy
from services.trainer.state import TrainState
from tests.support.fakes.idle_worker import IdleWorker

STATE = TrainState(step=1, policy_version=0, epoch=1)
PROBE = ([1, 2], [-0.5])


class SmallPolicy:
    """Four tensors of 40 bytes."""

    def probe(self) -> tuple[list[int], list[float]]:
        return PROBE

    def hf_tensor_specs(self) -> list[TensorSpec]:
        return [TensorSpec(f"t{number}", (10,), "float32") for number in range(4)]

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((spec.name, torch.zeros(10)) for spec in self.hf_tensor_specs())


class AskedRollout:
    """Takes part in publications of nothing, and remembers how it was asked."""

    def __init__(self) -> None:
        self.begun: list[pb.BeginPublishRequest] = []
        self.deadlines: list[float] = []
        self.probes: list[Probe] = []

    async def begin_publish(
        self, request: pb.BeginPublishRequest, *, deadline_seconds: float
    ) -> pb.BeginPublishResponse:
        self.begun.append(request)
        self.deadlines.append(deadline_seconds)
        return pb.BeginPublishResponse(world_size=2)

    async def publish_bucket(self, publication_id: str, bucket: int, *, deadline_seconds: float) -> None:
        pass

    async def commit_publish(self, *_: object, probe: Probe, deadline_seconds: float) -> pb.CommitPublishResponse:
        self.deadlines.append(deadline_seconds)
        self.probes.append(probe)
        return pb.CommitPublishResponse()

    async def abort_publish(self, publication_id: str, reason: str) -> None:
        pass


@asynccontextmanager
async def only_rank(*, sends: StageWeights | None = None) -> AsyncIterator[RankGroup[Any]]:
    """Rank 0, which sends nothing, or says that it sent `sends`."""

    class Worker(IdleWorker):
        def describe_weights(self) -> StageWeights | None:
            return sends

        def open_group(self, service: int) -> StageGroup | None:
            return StageGroup(0, "g", "host", 1, joined=True) if sends else None

        def send_weights(self, *_: object) -> Sent | None:
            return Sent(0, {}) if sends else None

    leader = Channel(0, 1, b"")
    yield RankGroup(leader, Worker(), ThreadPoolExecutor(1))
    await leader.close()


def job_of(**publish: Any) -> Job:
    services = {"rollout_address": "127.0.0.1:1"}
    return Job.model_validate({"model": {"hf_checkpoint": "m"}, "services": services, "publish": publish})


def sender_in(**publish: Any) -> Sender:
    layout = SimpleNamespace(device=torch.device("cpu"), pp_rank=0, tp_rank=0, dp_rank=0)
    return TrainerBuild(job_of(**publish), Path("run")).sender(
        cast(Policy, SmallPolicy()), cast(Layout, layout), lambda _: False
    )


def publisher_of(ranks: RankGroup[Any], rollout: AskedRollout, **publish: Any) -> Publisher:
    config, client = job_of(**publish).publish, cast(RolloutClient, rollout)
    root = RunFolder(Path("run")).weights_of(config)
    devices = OwnDevices()
    transport = transport_of(config, ranks, root, hashes=False, devices=devices)
    return Publisher(ranks, [client], transport, config, backend="gloo", away_seconds=60.0, devices=devices)


@pytest.mark.parametrize(("update_weight_buffer_size", "sizes"), [(80, [2, 2]), (100_000, [4]), (1, [1, 1, 1, 1])])
def test_update_weight_buffer_size_bounds_what_travels_at_once(
    update_weight_buffer_size: int, sizes: list[int]
) -> None:
    weights = sender_in(update_weight_buffer_size=update_weight_buffer_size).describe()
    assert weights is not None
    assert [len(bucket) for bucket in weights.buckets] == sizes


def test_after_update_weight_timeout_seconds_a_sender_gives_up_engines_that_do_not_come() -> None:
    sender = sender_in(update_weight_timeout_seconds=0.2)
    sender.open(0)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(sender.send, "v1", {0: 2}).result(2)
    assert sent is not None
    assert sent.error is not None
    sender.drop([0])


async def test_the_rollout_service_is_asked_to_pause_as_update_weight_pause_mode_says() -> None:
    rollout, modes = AskedRollout(), ("in_place", "retract", "abort")
    async with only_rank() as ranks:
        for mode in modes:
            await publisher_of(ranks, rollout, update_weight_pause_mode=mode).publish(STATE)
    expected = [pb.PAUSE_MODE_IN_PLACE, pb.PAUSE_MODE_RETRACT, pb.PAUSE_MODE_ABORT]
    assert [begun.pause_mode for begun in rollout.begun] == expected


async def test_the_rollout_service_compares_the_probe_within_update_weight_probe_tolerance() -> None:
    rollout = AskedRollout()
    async with only_rank() as ranks:
        for tolerance in (0.001, 7.0):
            await publisher_of(ranks, rollout, update_weight_probe_tolerance=tolerance).publish(STATE)
    assert rollout.probes == [Probe(*PROBE, 0.001), Probe(*PROBE, 7.0)]


@pytest.mark.parametrize("update_weight_disk_path", [None, Path("/shared/weights")])
def test_update_weight_disk_path_is_where_versions_lie_for_trainer_and_rollout_service(
    update_weight_disk_path: Path | None, tmp_path: Path
) -> None:
    job = job_of(update_weight_transport="disk", update_weight_disk_path=update_weight_disk_path)
    expected = update_weight_disk_path or tmp_path / "weights"
    assert TrainerBuild(job, tmp_path).weights_root == RunFolder(tmp_path).weights_of(job.publish) == expected


async def test_the_rollout_service_is_told_the_folder_of_a_version(tmp_path: Path) -> None:
    rollout = AskedRollout()
    async with only_rank(sends=StageWeights(0, [[TensorSpec("t", (10,), "float32")], []])) as ranks:
        publish = {"update_weight_transport": "disk", "update_weight_disk_path": tmp_path}
        await publisher_of(ranks, rollout, **publish, update_weight_timeout_seconds=7.0).publish(STATE)
    (begun,) = rollout.begun
    assert [begun.deadline_seconds, *rollout.deadlines] == [7.0, 7.0, 7.0]
    assert begun.transport == pb.TRANSPORT_DISK
    assert Path(begun.disk_path) == tmp_path / begun.publication_id
    assert [(tensor.name, tensor.bucket) for tensor in begun.manifest.tensors] == [("t", 0)]
    assert list(begun.groups) == []


@pytest.mark.parametrize(("gpus", "is_known"), [(1, True), (2, False)])
def test_senders_compute_checksums_where_they_have_the_tensors_that_engines_hash(gpus: int, is_known: bool) -> None:
    sizes = [{"num_engines": 1, "num_gpus_per_engine": size} for size in (1, gpus)]
    alike = {"rollout_num_gpus": gpus, "rollout_num_gpus_per_engine": gpus}
    for placement in (alike, {"engine_groups": sizes}):
        job = Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": placement})
        assert TrainerBuild(job, Path("run")).knows_checksums is is_known


DISK, IPC = "--update-weight-transport disk", "--update-weight-transport ipc"


def test_check_says_where_versions_lie_and_refuses_transports_that_cannot_be(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for transport, said in (
        (DISK, r"files in /\S*/weights, which .* must see"),
        (IPC, r"memory in /dev/shm/headrace-\S+"),
    ):
        assert main(["check", str(job_file), *transport.split()]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert re.search(rf"{said}: [\d.]+ GB a version, and two versions", printed)
    refused = {
        "--update-weight-disk-path w": "update_weight_disk_path has no effect without update_weight_transport",
        f"{DISK} --update-weight-rollback host": "update_weight_rollback host keeps a copy",
        f"{DISK} --rollout-address 10.0.0.7:7000": "with --update-weight-disk-path",
        f"{DISK} --update-weight-disk-path {job_file}/below": "update_weight_disk_path .* cannot be written",
        f"{IPC} --rollout-address 10.0.0.7:7000": "ipc with rollout at 10.0.0.7:7000",
        f"{IPC} --update-weight-rollback host": "in the folder of update_weight_transport ipc",
    }
    for flags, said in refused.items():
        assert main(["check", str(job_file), *flags.split()]) == 2
        captured = capsys.readouterr()
        assert re.search(said, " ".join((captured.out + captured.err).split())), captured


def test_auto_is_memory_where_all_is_started_here_a_broadcast_elsewhere_and_files_where_no_group_can_be(
    load_with: Callable[..., Job], job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, transport in (
        ("", "ipc"),
        ("--update-weight-rollback host", "collective"),
        ("--rollout-address 10.0.0.7:7000", "collective"),
        ("--update-weight-delta", "collective"),
        ("--update-weight-delta --sglang-pp-size 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2", "disk"),
    ):
        assert load_with(*flags.split()).publish.update_weight_transport == transport
    for flags in (f"{IPC} --update-weight-delta", "--update-weight-delta --rollout-external-engine-addrs 127.0.0.1:1"):
        with pytest.raises(ConfigError, match="update_weight_delta"):
            load_with(*flags.split())
    for flags, said in (("", "the whole each time, as in float32"), ("--bf16", "what changed alone")):
        assert main(["check", str(job_file), "--update-weight-delta", *flags.split()]) == 0
        assert f"broadcast to the engines; {said}" in " ".join(capsys.readouterr().out.split())


OURS = {"t": "0123"}


class Engines:
    """Have loaded `loaded`, and say no to it as often as they are told."""

    def __init__(self, loaded: Mapping[str, str], *noes: Exception) -> None:
        self.ways: list[int] = []
        self._loaded = loaded
        self._noes = list(noes)

    async def begin_publish(self, request: pb.BeginPublishRequest, **_: Any) -> pb.BeginPublishResponse:
        self.ways.append(request.transport)
        if self._noes:
            raise self._noes.pop(0)
        assert request.groups or request.transport == pb.TRANSPORT_LOADED
        return pb.BeginPublishResponse(world_size=2)

    async def publish_bucket(self, *_: object, **__: Any) -> None:
        assert self.ways[-1] == pb.TRANSPORT_COLLECTIVE

    async def commit_publish(self, _: str, checksums: Mapping[str, str], **__: Any) -> pb.CommitPublishResponse:
        if self.ways[-1] == pb.TRANSPORT_LOADED and checksums != self._loaded:
            raise ChecksumMismatch("1 of 1 tensors differ")
        return pb.CommitPublishResponse(engine_ids=["engine-0"])

    async def abort_publish(self, *_: object) -> None: ...


@asynccontextmanager
async def publisher(engines: Engines, done: list[str], *, hashes: bool = True) -> AsyncIterator[Publisher]:
    class Worker(IdleWorker):
        def describe_weights(self) -> StageWeights:
            return StageWeights(0, [[TensorSpec("t", (10,), "float32")]])

        def open_group(self, service: int) -> StageGroup:
            return StageGroup(0, "g", "host", 1, joined=True)

        def hash_weights(self) -> Sent:
            return Sent(0, OURS)

        def send_weights(self, *_: object) -> Sent:
            done.append("send")
            return Sent(0, OURS)

        def keep_weights(self) -> None:
            done.append("keep")

    channel = Channel(0, 1, b"")
    ranks: RankGroup[Any] = RankGroup(channel, Worker(), ThreadPoolExecutor(1))
    rollout = cast(RolloutClient, engines)
    other = CollectiveTransport(ranks, seconds=20.0, keeps=True)
    transport = LoadedFirst(ranks, other, seconds=20.0) if hashes else other
    yield Publisher(
        ranks, [rollout], transport, PublishSection(), backend="gloo", away_seconds=60.0, devices=OwnDevices()
    )
    await channel.close()


def at(step: int) -> TrainState:
    return TrainState(step=step, policy_version=0, epoch=1)


async def test_weights_that_engines_have_loaded_are_not_sent_but_kept_to_come_back_to() -> None:
    engines, done = Engines(OURS), list[str]()
    async with publisher(engines, done) as publishing:
        await publishing.publish(at(0))
        assert engines.ways == [pb.TRANSPORT_LOADED]
        assert done == ["keep"]
        await publishing.publish(at(1))
    assert engines.ways == [pb.TRANSPORT_LOADED, pb.TRANSPORT_COLLECTIVE]


async def test_others_are_sent_in_the_same_publication() -> None:
    engines = Engines({"t": "another"})
    async with publisher(engines, []) as publishing:
        await publishing.publish(at(0))
    assert engines.ways == [pb.TRANSPORT_LOADED, pb.TRANSPORT_COLLECTIVE]


async def test_what_engines_had_loaded_costs_none_of_the_tries() -> None:
    engines = Engines(OURS, *(Unavailable("no engine is alive") for _ in range(3)))
    async with publisher(engines, []) as publishing:
        await publishing.publish(at(0))
    assert engines.ways == [pb.TRANSPORT_LOADED, *[pb.TRANSPORT_COLLECTIVE] * 3]


@pytest.mark.parametrize(("step", "hashes"), [(3, True), (0, False)])
async def test_trained_weights_and_those_that_cannot_be_compared_are_sent(step: int, hashes: bool) -> None:
    engines = Engines(OURS)
    async with publisher(engines, [], hashes=hashes) as publishing:
        await publishing.publish(at(step))
    assert engines.ways == [pb.TRANSPORT_COLLECTIVE]
