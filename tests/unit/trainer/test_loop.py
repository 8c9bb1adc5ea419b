"""The training loop against fakes that write down what it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.errors import Fenced, ResourceExhausted
from services.trainer.loop import train
from services.trainer.plan.batch import Batch
from services.trainer.state import EngineIds, StaleEngines, TrainState


@dataclass
class Everything:
    """Ledger, ranks and console in one diary."""

    num_steps: int = 3
    publish_every: int = 1
    save_every: int | None = None
    restored: int = 0
    stop_at: int | None = None
    empty_leases: int = 0
    ready_to: int = -1
    all_are_stale: bool = False
    stale: EngineIds = field(default_factory=dict)
    background_steps: int = 0
    """So many steps after it was taken, a checkpoint is safe."""
    full_disk_at: frozenset[int] = frozenset()
    """Steps whose first checkpoint cannot be written."""
    stop_after_leases: int | None = None
    shows_evaluations: bool = False
    is_shared: bool = False
    taken: list[TrainState] = field(default_factory=list)
    diary: list[str] = field(default_factory=list)

    @property
    def stopping(self) -> bool:
        leases = [line for line in self.diary if line.startswith("lease")]
        return self.stop_after_leases is not None and len(leases) >= self.stop_after_leases

    async def rewind(self, step: int) -> int:
        self.diary.append(f"rewind {step}")
        return 7

    async def lease_batch(self, epoch: int, step: int) -> Batch | None:
        self.diary.append(f"lease {epoch}/{step}")
        if self.empty_leases:
            self.empty_leases -= 1
            return None
        return Batch((), f"digest {step}".encode())

    async def batch_ahead(self, epoch: int, step: int) -> Batch | None:
        return Batch((), b"") if step <= self.ready_to else None

    async def prefetch(self, batch: Batch) -> None:
        self.diary.append("prefetch")

    async def consume(self, epoch: int, step: int, digest: bytes) -> None:
        assert digest == f"digest {step}".encode()
        self.diary.append(f"consume {epoch}/{step}")

    async def commit(self, epoch: int, step: int) -> None:
        self.diary.append(f"commit {epoch}/{step}")

    async def set_policy_version(self, epoch: int, policy_version: int) -> None:
        self.diary.append(f"version {epoch}/{policy_version}")

    async def restore(self) -> int:
        return self.restored

    async def claim(self, state: TrainState) -> None:
        self.before_claim = list(self.diary)

    @property
    def devices(self) -> Any:
        return self

    @property
    def engines(self) -> Any:
        return self

    async def take(self) -> None:
        self.diary.append("take devices") if self.is_shared else None

    async def give(self) -> None:
        self.diary.append("give devices") if self.is_shared else None

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        self.diary.append(f"train {step}")
        return {}

    async def stale_engines(self, state: TrainState) -> StaleEngines:
        return StaleEngines(self.all_are_stale, self.stale)

    async def rejoin(self, state: TrainState, engine_ids: EngineIds) -> None:
        self.stale = {}
        self.diary.append(f"rejoin {','.join(engine_ids[0])}/{state.step}")

    async def publish(self, state: TrainState) -> dict[str, float]:
        self.all_are_stale = False
        self.diary.append(f"publish {state.step}")
        return {}

    async def save(self, state: TrainState) -> None:
        self.diary.append(f"save {state.step}")
        if state.step in self.full_disk_at:
            self.full_disk_at -= {state.step}
            raise ResourceExhausted("the disk is full")
        self.taken.append(state)

    async def flush(self) -> None:
        self.background_steps = 0

    def take_safe(self) -> TrainState | None:
        consumed = sum(line.startswith("consume") for line in self.diary) + self.restored
        safe = [state for state in self.taken if state.step + self.background_steps <= consumed]
        self.taken = self.taken[len(safe) :]
        return safe[-1] if safe else None

    async def export(self) -> None:
        self.diary.append("export")

    async def before_step(self, state: TrainState) -> bool:
        return state.step != self.stop_at

    async def evaluate(self, state: TrainState) -> None:
        self.diary.append(f"evaluate {state.step}") if self.shows_evaluations else None

    async def evaluated(self) -> None:
        self.diary.append("evaluated") if self.shows_evaluations else None

    def report(self, state: TrainState, metrics: dict[str, float]) -> None:
        self.diary.append(f"report {state.step}")

    def publishes(self, state: TrainState) -> bool:
        return state.step % self.publish_every == 0

    def saves(self, state: TrainState) -> bool:
        return self.save_every is not None and state.step % self.save_every == 0


async def run(everything: Everything) -> list[str]:
    await train(everything, everything, everything, everything)
    return everything.diary


async def test_a_step_is_leased_trained_consumed_published_and_saved_in_this_order() -> None:
    everything = Everything(num_steps=1, save_every=1)
    diary = await run(everything)
    assert everything.before_claim == ["rewind 0"]
    assert diary == [
        "rewind 0", "publish 0", "version 7/0",
        "lease 7/0", "train 0", "consume 7/0", "publish 1", "version 7/1", "save 1", "commit 7/1", "report 1",
        "export",
    ]  # fmt: skip


async def test_on_shared_devices_a_step_is_saved_before_a_publication_gives_them_to_the_engines() -> None:
    diary = await run(Everything(num_steps=1, save_every=1, is_shared=True, shows_evaluations=True))
    assert diary == [
        "rewind 0", "publish 0", "version 7/0", "evaluate 0", "give devices",
        "lease 7/0", "take devices", "train 0", "consume 7/0", "save 1", "publish 1", "version 7/1", "commit 7/1",
        "report 1", "evaluate 1", "export", "evaluated",
    ]  # fmt: skip


async def test_evaluations_are_offered_after_the_first_weights_and_each_step_and_the_last_is_waited_for() -> None:
    diary = await run(Everything(num_steps=2, shows_evaluations=True))
    asked = [line for line in diary if line.split()[0] in ("report", "evaluate", "evaluated", "export")]
    assert asked == ["evaluate 0", "report 1", "evaluate 1", "report 2", "evaluate 2", "export", "evaluated"]


async def test_what_is_ready_for_the_next_step_is_fetched_while_this_one_is_trained() -> None:
    diary = await run(Everything(num_steps=3, ready_to=3))
    around = [line for line in diary if line.startswith(("lease", "prefetch", "train"))]
    assert around == ["lease 7/0", "prefetch", "train 0", "lease 7/1", "prefetch", "train 1", "lease 7/2", "train 2"]


async def test_nothing_is_committed_that_no_checkpoint_holds() -> None:
    diary = await run(Everything(num_steps=5, save_every=2))
    for line in [entry for entry in diary if entry.startswith("commit")]:
        step = line.rpartition("/")[2]
        assert diary.index(f"save {step}") < diary.index(line)
    assert diary[-3:] == ["save 5", "commit 7/5", "export"]


async def test_a_checkpoint_in_the_background_is_committed_when_it_is_safe() -> None:
    diary = await run(Everything(num_steps=5, save_every=2, background_steps=1))
    assert diary.index("train 2") < diary.index("commit 7/2") < diary.index("train 3")
    assert [line for line in diary if line.startswith("commit")] == ["commit 7/2", "commit 7/4", "commit 7/5"]
    assert diary[-2:] == ["commit 7/5", "export"]


async def test_a_checkpoint_that_cannot_be_written_is_tried_again_at_the_next_interval() -> None:
    diary = await run(Everything(num_steps=7, save_every=2, full_disk_at=frozenset({2, 4})))
    assert [line for line in diary if line.startswith(("save", "commit"))] == [
        "save 2", "save 4", "save 6", "commit 7/6", "save 7", "commit 7/7"
    ]  # fmt: skip


async def test_the_last_checkpoint_is_tried_twice_and_then_ends_the_run_with_its_reason() -> None:
    diary = await run(Everything(num_steps=4, save_every=2, full_disk_at=frozenset({4})))
    assert diary[-3:] == ["save 4", "commit 7/4", "export"]
    assert diary.count("save 4") == 2
    everything = Everything(num_steps=4, full_disk_at=frozenset({4}))
    with pytest.raises(ResourceExhausted):
        await run(everything)
    assert everything.diary[-1] == "save 4"


@pytest.mark.parametrize("fenced_at", [2, 4])
async def test_a_checkpoint_that_a_newer_trainer_refuses_ends_the_run_at_once(fenced_at: int) -> None:
    """Nothing is leased, trained or saved after it, also where the newer trainer would refuse no later save."""

    class Fencing(Everything):
        async def save(self, state: TrainState) -> None:
            await super().save(state)
            if state.step == fenced_at:
                raise Fenced("a newer trainer has taken over")

    everything = Fencing(num_steps=4, save_every=1)
    with pytest.raises(Fenced):
        await run(everything)
    assert everything.diary[-1] == f"save {fenced_at}"


async def test_a_stop_ends_the_wait_for_a_batch_and_saves_what_is_trained() -> None:
    diary = await run(Everything(num_steps=9, restored=3, empty_leases=99, stop_after_leases=2))
    assert diary == ["rewind 3", "publish 3", "version 7/3", "lease 7/3", "lease 7/3", "export"]


async def test_versions_skip_numbers_with_an_update_interval() -> None:
    diary = await run(Everything(num_steps=4, publish_every=2))
    assert [line for line in diary if line.startswith("version")] == ["version 7/0", "version 7/2", "version 7/4"]


async def test_engines_that_came_back_without_their_weights_get_them_while_the_batch_is_awaited() -> None:
    everything = Everything(num_steps=3, restored=2, empty_leases=2)
    publish = everything.publish

    async def publish_then_lose(state: TrainState) -> dict[str, float]:
        figures = await publish(state)
        everything.all_are_stale = everything.diary.count("publish 2") == 1
        return figures

    everything.publish = publish_then_lose  # type: ignore[method-assign]
    diary = await run(everything)
    assert diary[2:8] == ["version 7/2", "lease 7/2", "publish 2", "version 7/2", "lease 7/2", "lease 7/2"]


async def test_one_engine_that_came_back_gets_the_served_weights_alone_while_the_batch_is_awaited() -> None:
    diary = await run(Everything(num_steps=3, restored=2, empty_leases=2, stale={0: ["engine-1"]}))
    assert diary[1:7] == ["publish 2", "version 7/2", "lease 7/2", "rejoin engine-1/2", "lease 7/2", "lease 7/2"]
