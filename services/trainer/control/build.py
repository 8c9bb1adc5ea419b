"""The parts of one rank as a job wants them. Only this module of the folder reads a whole job."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.client.open import open_rollout
from headrace.client.rollout import Rollout, RolloutClient
from headrace.errors import ConfigError, DataLoss, HeadraceError, NotFound
from headrace.job.eval_sets import eval_sets
from headrace.job.schema.job import Job, changed_options
from headrace.job_buffer import buffer_of
from headrace.limits import PEER_WAIT_SECONDS
from headrace.models.folders import QuantizedForm, base_digest
from headrace.recorded_steps import RecordedSteps
from headrace.rpc.log import log
from headrace.rpc.net import Address, host_towards
from headrace.rpc.retry import retry_until
from headrace.run_folder import RunFolder
from headrace.sample_log import SampleLog
from services.trainer.checkpoint.checkpoint import Checkpoints, checkpoint_folder
from services.trainer.control.publication import Publisher
from services.trainer.control.ranks import JoinedRanks, RankGroup, TrainerRanks
from services.trainer.control.senders import AdapterWriter, Sender, WeightSender, WeightWriter
from services.trainer.control.transport import transport_of
from services.trainer.control.worker import RankWorker
from services.trainer.data.buffer import RecordedBuffer, StepRecorder, TrainerBuffer, TrainingRecord
from services.trainer.data.samples import Fetch, SkippedSamples, TrainedSamples
from services.trainer.durable import remove
from services.trainer.gpu_sharing import OwnDevices, SharedDevices, clear
from services.trainer.loop import Devices
from services.trainer.megatron.parallel import Layout
from services.trainer.model.build import logs_samples, policy_of
from services.trainer.model.policy import Policy
from services.trainer.model.profile import StepProfiler
from services.trainer.serving.console import TrainerConsole
from services.trainer.serving.evaluation import evaluations_of
from services.trainer.serving.report import RunReport
from services.trainer.serving.servicer import ExportFolders
from services.trainer.serving.trackers import trackers
from services.trainer.standalone import NoEngines
from services.trainer.state import JobSchedule
from services.trainer.weights.buckets import MemoryFiles

_CALL_SECONDS = 60.0
"""The deadline of calls to a rollout service that set none."""


@dataclass(frozen=True, slots=True)
class Built:
    layout: Layout
    worker: RankWorker
    checkpoints: Checkpoints
    restored_step: int


async def _renew(
    service: RolloutClient, lease_seconds: float, join: Callable[[RolloutClient, float], Awaitable[float]]
) -> None:
    """A service that started again has the run again after this."""
    while True:
        await asyncio.sleep(lease_seconds / _RENEWALS_PER_LEASE)
        try:
            await join(service, lease_seconds)
        except HeadraceError as error:
            log.warning("run_not_joined", service=service.address, reason=error.reason, error=error.message)


_RENEWALS_PER_LEASE = 3
_LEAVE_SECONDS = 5.0


class TrainerBuild:
    def __init__(self, job: Job, run_dir: Path) -> None:
        self.job = job
        self.run_dir = run_dir

    @property
    def rollout_address(self) -> str:
        """`host:port`; of several services with commas between them. Raises ConfigError when the job names none."""
        if (address := self.job.services.rollout_address) is None:
            raise ConfigError(
                "services.rollout_address is not set: start the service and pass --rollout-address host:port"
            )
        return address

    def buffer(self) -> TrainerBuffer:
        """A client of the job's buffer. Raises ConfigError when the job names none."""
        if (pattern := self.job.debug.load_debug_rollout_data) is not None:
            return RecordedBuffer(RecordedSteps(pattern))
        return buffer_of(self.job.services)

    def rollout(self) -> Rollout | None:
        """A client of the job's rollout services; None where the trainer is alone."""
        return (
            None
            if self.job.debug.trains_alone
            else open_rollout(self.rollout_address, deadline_seconds=_CALL_SECONDS, run=self.job.run.run_name)
        )

    @asynccontextmanager
    async def joined(self, rollout: Rollout | None) -> AsyncIterator[None]:
        """Takes part in the rollout services, which may be those of another run, until the block ends.

        Raises FailedPrecondition, AlreadyExists or ResourceExhausted where one cannot take this run.
        """
        if rollout is None or not self.job.asks_engines:
            yield
            return
        job, seconds = self.job, self.job.services.start_timeout_seconds
        paths = {"run_dir": job.run.run_dir.absolute()}
        job_json = job.model_copy(update={"run": job.run.model_copy(update=paths)}).model_dump_json()
        digest = await asyncio.to_thread(base_digest, job.model.hf_checkpoint)

        async def join(service: RolloutClient, seconds: float) -> float:
            return await retry_until(
                time.monotonic() + seconds,
                lambda left: service.join_run(job_json, digest, deadline_seconds=left),
            )

        leases = await asyncio.gather(*(join(service, seconds) for service in rollout.services))
        shared = [(service, lease) for service, lease in zip(rollout.services, leases, strict=True) if lease]
        renewing = [asyncio.create_task(_renew(service, lease, join)) for service, lease in shared]
        try:
            yield
        finally:
            for task in renewing:
                task.cancel()
            await asyncio.gather(*renewing, return_exceptions=True)
            leaving = (service.leave_run(deadline_seconds=_LEAVE_SECONDS) for service, _ in shared)
            await asyncio.gather(*leaving, return_exceptions=True)  # what is left there ends with its lease

    def recorder(self, buffer: TrainerBuffer, stream: str) -> StepRecorder | None:
        pattern = self.job.debug.save_debug_rollout_data
        return None if pattern is None else StepRecorder(RecordedSteps(pattern), buffer, stream)

    @property
    def trains(self) -> bool:
        """False where the run only generates."""
        return not self.job.debug.debug_rollout_only

    def rank(self, fetch: Fetch, joined: JoinedRanks) -> Built:
        """Builds the policy with its latest checkpoint, in the compute thread of every rank at once."""
        job, layout = self.job, joined.layout
        if job.placement.offload_train:
            log.info("memory_taken")
        policy = policy_of(job, layout)
        checkpoints = Checkpoints(job.checkpoint, self.run_dir, layout)
        log.info("restoring", folder=str(checkpoint_folder(job.checkpoint, self.run_dir)))
        restored_step = checkpoints.restore_latest(policy.saved)
        sender = self.sender(policy, layout, joined.channel.is_aborted)
        gc.freeze()  # libraries and the model stay: a collection that looks at them costs a step 0.1 s
        log.info("built", restored_step=restored_step)
        steps = job.debug.profiled_steps
        profiler = StepProfiler(steps, RunFolder(self.run_dir).profile, layout) if steps else None
        worker = RankWorker(policy, sender, fetch, checkpoints, self._trained_samples(layout), profiler)
        return Built(layout, worker, checkpoints, restored_step)

    @property
    def weights_root(self) -> Path:
        """Holds the versions that travel through files."""
        return RunFolder(self.run_dir).weights_of(self.job.publish)

    def clear_memory(self) -> None:
        """Deletes what lies in shared memory: nobody loads it without this trainer."""
        if self.job.publish.update_weight_transport == "ipc":
            remove(self.weights_root)

    def sender(self, policy: Policy, layout: Layout, is_aborted: Callable[[str], bool]) -> Sender:
        publish, form = self.job.publish, QuantizedForm.of(self.job.model.hf_checkpoint)
        if publish.update_weight_transport == "adapter":
            return AdapterWriter(policy, layout, is_aborted, root=self.weights_root)
        if not publish.is_broadcast:
            return WeightWriter(
                policy,
                layout,
                is_aborted,
                root=self.weights_root,
                file_bytes=publish.update_weight_buffer_size,
                memory=MemoryFiles() if publish.update_weight_transport == "ipc" else None,
                form=form,
                hashes=self.knows_checksums,
                leaves=self.job.placement.colocate,
            )
        return WeightSender(
            policy,
            layout,
            is_aborted,
            host=self._host_for_engines(),
            bucket_bytes=publish.update_weight_buffer_size,
            timeout_seconds=publish.update_weight_timeout_seconds,
            form=form,
            hashes=self.knows_checksums,
        )

    def _far_engines(self) -> list[Address]:
        """Addresses on the way to engines of other machines."""
        if self.job.debug.trains_alone:
            return []
        places = (*self.rollout_address.split(","), *self.job.placement.rollout_external_engine_addrs)
        return [address for address in map(Address.parse, places) if not address.is_loopback]

    def _host_for_engines(self) -> str:
        if far := self._far_engines():
            return host_towards(far[0])
        if self.job.placement.rollout_placement == "local":
            return "127.0.0.1"
        return socket.gethostbyname(socket.gethostname())

    @property
    def knows_checksums(self) -> bool:
        """True where senders have the tensors that engines hash: those of several ranks hash shards."""
        return self.job.placement.engine_sizes == (1,)

    def schedule(self) -> JobSchedule:
        return schedule_of(self.job, self._recorded_steps())

    def _recorded_steps(self) -> int | None:
        """The step before which a run on recorded steps ends; None where it is num_rollout."""
        if (pattern := self.job.debug.load_debug_rollout_data) is None:
            return None
        steps = RecordedSteps(pattern).steps()
        if not steps:
            raise ConfigError(
                f"load_debug_rollout_data {pattern}: there is no such file: name those of an earlier run's "
                "--save-debug-rollout-data",
                field="load_debug_rollout_data",
            )
        num_steps = min(self.job.rollout.num_rollout, steps[-1] + 1)
        if num_steps < self.job.rollout.num_rollout:
            log.warning("recorded_steps_end", num_steps=num_steps, num_rollout=self.job.rollout.num_rollout)
        return num_steps

    def report(self) -> RunReport:
        job = self.job
        return RunReport(
            self.run_dir,
            trackers(job.tracking, job.run.run_name, job.model_dump(mode="json"), self.run_dir),
            self._changes(),
        )

    def _changes(self) -> list[str]:
        """What this start changes. Its launcher replaces the folder's job once this trainer is ready."""
        try:
            return changed_options(RunFolder(self.run_dir).job(), self.job)
        except (NotFound, DataLoss):  # no launcher made the folder, or an earlier version did
            return []

    def console(self, report: RunReport, rollout: Rollout | None, schedule: JobSchedule) -> TrainerConsole:
        job = self.job
        return TrainerConsole(
            report,
            evaluations_of(job, rollout, schedule, report, RunFolder(self.run_dir)),
            run=job.run.run_name,
            num_steps=schedule.num_steps,
            groups_per_step=job.rollout.groups_per_step,
        )

    def exports(self) -> ExportFolders:
        """The folders to which people may export the model while it is trained."""
        run, checkpoint = RunFolder(self.run_dir), self.job.checkpoint
        return ExportFolders(
            checkpoint.export_root or self.run_dir,
            [checkpoint_folder(checkpoint, self.run_dir), run.ledger, run.logs, run.samples, self.weights_root],
        )

    def ranks(
        self, group: RankGroup[RankWorker], built: Built, rollout: Rollout | None, console: TrainerConsole
    ) -> TrainerRanks:
        devices = self._devices(group, rollout)
        return TrainerRanks(
            group,
            NoEngines()
            if rollout is None or not self.job.asks_engines
            else self._publisher(group, built, rollout, devices),
            console,
            TrainingRecord(self.run_dir / "trained.jsonl"),
            SkippedSamples(self.run_dir / "set_aside.jsonl"),
            built.checkpoints,
            restored_step=built.restored_step,
            num_steps=self.job.rollout.num_rollout,
            save_hf=self.job.checkpoint.save_hf,
            devices=devices,
        )

    async def clear_devices(self, rollout: Rollout | None) -> None:
        """Makes engines give up their memory on shared devices before any rank has memory there."""
        if rollout is not None and self.job.placement.offload_rollout and self.job.asks_engines:
            await clear(rollout.services, seconds=self._away_seconds)

    @property
    def _away_seconds(self) -> float:
        return self.job.services.start_timeout_seconds + PEER_WAIT_SECONDS  # its engines may be starting

    def _devices(self, group: RankGroup[RankWorker], rollout: Rollout | None) -> Devices:
        placement = self.job.placement
        if rollout is None or not placement.colocate or not self.job.asks_engines:
            return OwnDevices()
        seconds = self.job.publish.update_weight_timeout_seconds
        return SharedDevices(
            rollout.services if placement.offload_rollout else (),
            seconds=self._away_seconds,
            to_host=partial(group.gather, seconds, RankWorker.to_host) if placement.offload_train else None,
            to_device=partial(group.gather, seconds, RankWorker.to_device) if placement.offload_train else None,
        )

    def _publisher(self, group: RankGroup[RankWorker], built: Built, rollout: Rollout, devices: Devices) -> Publisher:
        backend, publish = "nccl" if built.layout.device.type == "cuda" else "gloo", self.job.publish
        hashes = self.knows_checksums
        written = None if publish.update_weight_disk_path is None else RunFolder(self.run_dir).written_weights
        transport = transport_of(publish, group, self.weights_root, hashes=hashes, devices=devices, written=written)
        return Publisher(
            group,
            rollout.services,
            transport,
            publish,
            backend=backend,
            away_seconds=self._away_seconds,
            devices=devices,
        )

    def _trained_samples(self, layout: Layout) -> TrainedSamples | None:
        if not logs_samples(self.job, layout):
            return None
        log_bytes = self.job.tracking.sample_log_bytes
        return TrainedSamples(SampleLog(RunFolder(self.run_dir).samples), layout.data_rank, log_bytes)


def schedule_of(job: Job, num_steps: int | None = None) -> JobSchedule:
    """The rhythm that the job's intervals give, for num_rollout steps unless another number is given."""
    return JobSchedule(
        num_steps or job.rollout.num_rollout,
        publish_every=job.publish.update_weights_interval,
        save_every=job.checkpoint.save_interval,
        eval_every={each.name: each.interval or job.eval.eval_interval for each in eval_sets(job.eval)},
        evaluates_first=not job.eval.skip_eval_before_train,
    )
