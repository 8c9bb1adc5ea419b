"""What every rank does with a command. Runs in the rank's compute thread, never on its event loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.trainer.checkpoint.checkpoint import Checkpoints
from services.trainer.control.commands import (
    Command,
    DropGroups,
    Export,
    Leave,
    OpenGroups,
    Prefetch,
    Save,
    SendWeights,
    Train,
)
from services.trainer.control.sender import WeightSender
from services.trainer.data.fetch import Fetch
from services.trainer.data.reading import Unreadable
from services.trainer.data.sample_log import SamplesRead, TrainedSamples
from services.trainer.model.policy import Policy
from services.trainer.plan.batch import SampleFacts


class Worker:
    """One rank's share of the trainer: its part of the policy, of the samples and of the sending."""

    def __init__(
        self,
        policy: Policy,
        sender: WeightSender,
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

    @property
    def set_aside(self) -> Sequence[Unreadable]:
        """Samples of the latest Train that could not be used."""
        return self._policy.set_aside

    def execute(self, command: Command) -> dict[str, float]:
        """Metrics of a Train, nothing otherwise. An error ends the rank, and with it the trainer; but a HeadraceError
        of a Save or an Export is raised on all ranks alike (`agreement`), and they can go on.
        """
        match command:
            case Train(step, samples):
                return self._train(step, samples)
            case Prefetch(samples):
                self._fetch.begin(self._policy.own_sample_ids(samples))
            case OpenGroups(publication_id):
                self._sender.open(publication_id)
            case SendWeights():
                self._sender.send(command)
            case DropGroups():
                self._sender.drop()
            case Save(step, policy_version, epoch):
                self._wait_for_samples()
                self._checkpoints.save(self._policy, step=step, policy_version=policy_version, epoch=epoch)
            case Export(path):
                self._policy.export(Path(path))
            case Leave():
                self._wait_for_samples()
                self._checkpoints.wait()
        return {}

    def _train(self, step: int, samples: Sequence[SampleFacts]) -> dict[str, float]:
        if self._trained_samples is None:
            return self._policy.train(step, samples, self._fetch)
        read = SamplesRead(self._fetch, step + 1)
        metrics = self._policy.train(step, samples, read)
        self._trained_samples.write(step + 1, read.but(self._policy.set_aside))
        return metrics

    def _wait_for_samples(self) -> None:
        if self._trained_samples is not None:
            self._trained_samples.wait()
