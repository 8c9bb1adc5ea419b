"""Carries out rank 0's commands. Runs in the rank's compute thread, never on its event loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.trainer.checkpoint.checkpoint import Checkpoints
from services.trainer.control.messages import (
    Command,
    DescribeWeights,
    DropGroups,
    Export,
    HashWeights,
    KeepWeights,
    Leave,
    OpenGroups,
    Prefetch,
    ProbeWeights,
    Result,
    Save,
    SendWeights,
    ToDevice,
    ToHost,
    Train,
    Trained,
)
from services.trainer.control.transport import Sender
from services.trainer.data.samples import Fetch, SamplesRead, TrainedSamples
from services.trainer.model.policy import Policy
from services.trainer.plan.batch import SampleFacts


class RankWorker:
    """One rank's share of the trainer: its part of the policy, of the samples and of the sending."""

    def __init__(
        self,
        policy: Policy,
        sender: Sender,
        fetch: Fetch,
        checkpoints: Checkpoints,
        trained_samples: TrainedSamples | None,
    ) -> None:
        self._policy = policy
        self._sender = sender
        self._fetch = fetch
        self._checkpoints = checkpoints
        self._trained_samples = trained_samples
        """None on ranks that know no samples of their own, and where the job wants none written"""

    def execute(self, command: Command) -> Result | Trained:  # noqa: C901  # one case a command
        """Runs one command on this rank.

        An error ends the rank, and with it the trainer. A HeadraceError of a Save or an Export does not: it is raised
        on all ranks alike (`agreement`), and they can go on.
        """
        match command:
            case Train(step, samples):
                return Trained(self._train(step, samples), self._policy.set_aside, self._policy.is_logged)
            case Prefetch(samples):
                self._fetch.begin(self._policy.own_sample_ids(samples))
            case DescribeWeights():
                return self._sender.describe()
            case OpenGroups(service):
                return self._sender.open(service)
            case ProbeWeights():
                return self._sender.probe()
            case SendWeights(publication_id, world_sizes, kept):
                return self._sender.send(publication_id, world_sizes, kept=kept)
            case HashWeights():
                return self._sender.hashed()
            case KeepWeights():
                self._sender.keep()
            case DropGroups(services):
                self._sender.drop(services)
            case ToHost():
                self._policy.memory.to_host()
            case ToDevice():
                self._policy.memory.to_device()
            case Save(step, policy_version, epoch):
                self._wait_for_samples()
                self._checkpoints.save(self._policy.saved, step=step, policy_version=policy_version, epoch=epoch)
            case Export(path):
                self._policy.export(Path(path))
            case Leave():
                self._wait_for_samples()
                self._checkpoints.wait()
        return None

    def _train(self, step: int, samples: Sequence[SampleFacts]) -> dict[str, float]:
        if self._trained_samples is None:
            return self._policy.train(step, samples, self._fetch)
        read = SamplesRead(self._fetch, step + 1)
        metrics = self._policy.train(step, samples, read)
        self._trained_samples.write(step + 1, read.of(self._policy.trained_ids))
        return metrics

    def _wait_for_samples(self) -> None:
        if self._trained_samples is not None:
            self._trained_samples.wait()
