"""What every rank does with a command. Runs in the rank's compute thread, never on its event loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.trainer.checkpoint import Checkpoints
from services.trainer.commands import Command, DropGroups, Export, Leave, OpenGroups, Prefetch, Save, SendWeights, Train
from services.trainer.fetch import Fetch
from services.trainer.policy import Policy
from services.trainer.reading import Unreadable
from services.trainer.sender import WeightSender


class Worker:
    """One rank's share of the trainer: its part of the policy, of the samples and of the sending."""

    def __init__(self, policy: Policy, sender: WeightSender, fetch: Fetch, checkpoints: Checkpoints) -> None:
        self._policy = policy
        self._sender = sender
        self._fetch = fetch
        self._checkpoints = checkpoints

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
                return self._policy.train(step, samples, self._fetch)
            case Prefetch(samples):
                self._fetch.begin(self._policy.own_sample_ids(samples))
            case OpenGroups(publication_id):
                self._sender.open(publication_id)
            case SendWeights():
                self._sender.send(command)
            case DropGroups():
                self._sender.drop()
            case Save(step, policy_version, epoch):
                self._checkpoints.save(self._policy, step=step, policy_version=policy_version, epoch=epoch)
            case Export(path):
                self._policy.export(Path(path))
            case Leave():
                self._checkpoints.wait()
        return {}
