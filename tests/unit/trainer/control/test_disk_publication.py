"""Publications through files: which folders are there when, who loads them, and what becomes of bad ones.

A real publisher and a real receiver; ranks and engines are fakes that share a folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from services.rollout.engine.fleet import EngineState
from services.trainer.control.senders import Sent
from services.trainer.control.transport import sweep
from services.trainer.state import TrainState
from tests.unit.trainer.control.test_rollback import Run, weights_of

NOBODY: frozenset[int] = frozenset()


def a_run(root: Path) -> Run:
    return Run("nothing", "refuses", "disk", root)


def folders(root: Path) -> list[str]:
    """The versions that lie there."""
    return sorted(path.name.split("-")[1] for path in root.iterdir())


def flip_a_byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2])


async def test_a_wrong_byte_in_a_file_is_not_served_and_engines_load_the_version_before(tmp_path: Path) -> None:
    for spoil in (flip_a_byte, cut):
        root = tmp_path / spoil.__name__
        root.mkdir()
        async with a_run(root) as run:
            assert await run.publish(1, failing=NOBODY)
            run.worker.spoil = spoil
            assert not await run.publish(2, failing=NOBODY)
            await run.serves(1)
            assert folders(root) == ["v1"], "what failed fills no disk"
            run.worker.spoil = lambda folder: None
            assert await run.publish(3, failing=NOBODY)
            await run.serves(3)
            assert folders(root) == ["v3"], "only the served version stays"
            assert [await run.fleet.weights.version_of(name) for name in run.mixtures] == [None] * len(run.mixtures)


async def test_an_engine_that_came_back_loads_the_served_folder_and_nothing_is_written(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        assert await run.publish(1, failing=NOBODY)
        await lost(run, 1)
        await rejoin(run)
        assert run.model.num_sent == 1
        assert run.fakes.fake(1).weights == weights_of(1)
        assert [engine.state for engine in run.fleet.engines] == [EngineState.READY] * 2


async def test_a_served_folder_that_went_bad_is_written_again(tmp_path: Path) -> None:
    async with a_run(tmp_path) as run:
        assert await run.publish(1, failing=NOBODY)
        flip_a_byte(next(tmp_path.iterdir()))
        await lost(run, 1)
        await rejoin(run)
        assert run.model.num_sent == 1
        assert run.fleet.engines[1].state is not EngineState.READY
        await run.fakes.until(lambda: run.fleet.engines[1].state is EngineState.STALE)
        await rejoin(run)
        assert run.fleet.engines[1].state is EngineState.READY
        assert folders(tmp_path) == ["v1"]
        await lost(run, 1)
        await rejoin(run)
        assert run.model.num_sent == 2, "what was written again is the served folder now"
        assert run.fleet.engines[1].state is EngineState.READY


async def lost(run: Run, number: int) -> None:
    run.fakes.fake(number).die()
    await run.fakes.until(lambda: run.fleet.engines[number].state is EngineState.STALE)


async def rejoin(run: Run) -> None:
    await run.publisher.rejoin(TrainState(step=1, policy_version=1, epoch=1), {0: ["engine-1"]})


async def test_a_disk_that_is_full_leaves_the_old_version_in_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_run(tmp_path) as run:
        assert await run.publish(1, failing=NOBODY)
        full = Sent(0, {}, "the disk is full: free some space, or name a folder on another disk")
        monkeypatch.setattr(run.worker, "send_weights", lambda *_: full)
        run.model.version = 2
        calls = run.fakes.fake(0).calls.count("/pause_generation")
        with pytest.raises(HeadraceError, match="stage 0: the disk is full"):
            await run.publisher.publish(TrainState(step=2, policy_version=1, epoch=1))
        assert run.fakes.fake(0).calls.count("/pause_generation") == calls + 1, "to roll back"
        run.model.version = 1
        await run.serves(1)


async def test_a_trainer_makes_room_before_it_writes(tmp_path: Path) -> None:
    (tmp_path / "e0-v9-0a1b2c3d").mkdir()
    (tmp_path / ".e0-v9-1a1b2c3d.draft").mkdir()
    seen: list[int] = []
    async with a_run(tmp_path) as run:
        run.worker.spoil = lambda folder: seen.append(len(list(tmp_path.iterdir())))
        assert await run.publish(1, failing=NOBODY)
    assert seen == [1]


def test_what_older_trainers_left_is_deleted_and_in_a_shared_folder_what_this_run_noted_alone(tmp_path: Path) -> None:
    own, others = ["e1-v3-0a1b2c3d", ".e1-v4-0a1b2c3d.draft", "e2-v1-1a1b2c3d", "e2-v2-2a1b2c3d"], ["e1-v3-0000aaaa"]
    kept = ["e3-v1-0a1b2c3d", "mine", "e1-v3-notmine!", ".e2.segments"]
    written, root = tmp_path / "written-weights.jsonl", tmp_path / "shared"
    noted = [name.strip(".").removesuffix(".draft") for name in own]
    written.write_text("".join(json.dumps({"publication_id": name}) + "\n" for name in noted) + '{"publication_')
    for name in (*own, *others, *kept, ".e1.segments"):
        (root / name).mkdir(parents=True)
    sweep(root, {own[3]}, 2, written)
    assert sorted(path.name for path in root.iterdir()) == sorted([own[3], *others, *kept])
    sweep(root, set(), 2)
    assert sorted(path.name for path in root.iterdir()) == sorted(kept)
    sweep(tmp_path / "not there yet", set(), 2)
