"""What happens to a job in a soak beside its training: clients that come and go, evaluations, swaps, kills.

Services are killed in the first half only: in the second, on which the verdict is, a line must not begin anew.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from headrace.client.buffer import BufferClient
from headrace.client.trainer import TrainerClient
from headrace.errors import HeadraceError
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.processes.stand_in_run import StandInRun

_KILL_SECONDS = 240.0
_REWARD = '''"""Version {number}."""
import random


async def judge(args, sample, **kwargs):
    return random.random() + {number} * 0.001
'''


class Traffic:
    """Does one thing after the other, chosen by chance, until cancelled."""

    def __init__(self, run: StandInRun, reward_file: Path, seconds: float) -> None:
        self.done: Counter[str] = Counter()
        self._run = run
        self._reward_file = reward_file
        self._half = asyncio.get_running_loop().time() + seconds / 2
        self._random = random.Random(0)
        self._always: Mapping[str, Callable[[], Awaitable[None]]] = {
            "a client looks and leaves": self._look,
            "a watcher leaves in the middle": self._watch,
            "prompts are submitted": self._submit,
            "a checkpoint is asked for": self._save,
            "training is paused": self._pause,
        }
        self._first_half: Mapping[str, Callable[[], Awaitable[None]]] = {
            "the reward service is swapped": self._swap_reward,
            "the buffer is killed": lambda: self._kill("buffer"),
            "the rollout service is killed": lambda: self._kill("rollout"),
            "the trainer is killed": lambda: self._kill("trainer"),
            "the engine is killed": self._kill_engine,
        }

    async def go_on(self, pause_seconds: float) -> None:
        """Each kill once at least, and then by chance, seldom enough for the launcher's limit of restarts."""
        kills = list(self._first_half)
        clock, next_kill = asyncio.get_running_loop().time, 0.0
        while True:
            if clock() < self._half and clock() >= next_kill:
                name = kills.pop(0) if kills else self._random.choice(list(self._first_half))
                next_kill = clock() + (0.0 if kills else _KILL_SECONDS)
            else:
                name = self._random.choice(list(self._always))
            try:
                async with asyncio.timeout(120):
                    await (self._always | self._first_half)[name]()
                self.done[name] += 1
            except (HeadraceError, TimeoutError, KeyError):  # a service is away that was killed a moment ago
                self.done[f"{name}: nobody answered"] += 1
            await asyncio.sleep(pause_seconds)

    async def _look(self) -> None:
        async with BufferClient(await self._run.run.address_of("buffer")) as client:
            await client.stats("train")
            await client.list_groups("train", page_size=50)

    async def _watch(self) -> None:
        async with BufferClient(await self._run.run.address_of("buffer")) as client:
            seen = 0
            async for _ in client.watch("train", await client.position()):
                seen += 1
                if seen == 20:
                    return

    async def _submit(self) -> None:
        async with BufferClient(await self._run.run.address_of("buffer")) as client:
            await client.submit_prompts("train", text_prompts(f"What is {self._random.randrange(1000)} + 1?"))

    async def _save(self) -> None:
        async with TrainerClient(await self._run.run.address_of("trainer")) as client:
            await client.save_checkpoint()

    async def _pause(self) -> None:
        async with TrainerClient(await self._run.run.address_of("trainer")) as client:
            await client.pause()
            await client.resume()

    async def _swap_reward(self) -> None:
        write_reward(self._reward_file, self.done.total())
        await self._kill("reward")

    async def _kill(self, service: str) -> None:
        os.kill(self._run.pid(service), signal.SIGKILL)
        await asyncio.sleep(1.0)
        await self._run.run.until_serving(service)

    async def _kill_engine(self) -> None:
        await self._run.kill_engine()
        await self._run.start_engine()


def write_reward(file: Path, number: int) -> None:
    """Takes the place of the one before at once."""
    draft = file.with_suffix(".draft")
    draft.write_text(_REWARD.format(number=number))
    draft.replace(file)
