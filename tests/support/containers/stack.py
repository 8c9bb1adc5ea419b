"""The services of deploy/compose.yaml, each a container with the options written there, without a compose program."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.containers.engine import Engine
from tests.support.deployments import DEPLOY, SERVICES

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
_HEALTHY_SECONDS = 900.0
_LAST_LINES = "60"
_JOB = "../job"


class Stack:
    def __init__(self, engine: Engine, job: Path, variables: Mapping[str, str]) -> None:
        """`job` is the folder that compose.yaml mounts as ../job; `variables` are added to each service's own."""
        self._engine = engine
        self._job = job
        self._name = f"headrace-{uuid.uuid4().hex[:8]}"
        self._variables = dict(variables)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Stack]:
        """Leaves nothing behind but images."""
        internal = ["--internal"] if COMPOSE["networks"]["run"]["internal"] else []
        await self._engine.said("network", "create", *internal, self._name)
        try:
            yield self
        except BaseException:
            print(await self.last_words())
            raise
        finally:
            for service in COMPOSE["services"]:
                await self.remove(service)
            for volume in COMPOSE["volumes"]:
                await self._engine.does("volume", "rm", self._of(volume))
            await self._engine.said("network", "rm", self._name)

    async def start(self, service: str, **variables: str) -> None:
        """Creates the container and starts it."""
        name = ["--detach", "--name", self._of(service), "--restart", COMPOSE["services"][service]["restart"]]
        await self._run(service, name, COMPOSE["services"][service]["command"], variables)

    async def write_job(self) -> None:
        """Runs `headrace init` in the image of all services, as the first lines of compose.yaml do."""
        who = ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "XDG_CACHE_HOME=/job/.cache"]
        words = ["--rm", *who, "--volume", f"{self._job}:/job", "headrace", "headrace", "init", "/job"]
        await self._engine.said("run", *self._engine.run_flags, *words)

    async def certificates(self) -> None:
        """Runs compose.yaml's `certs` to its end."""
        service = COMPOSE["services"]["certs"]
        entry, *first = service["entrypoint"]
        await self._run("certs", ["--rm", "--entrypoint", entry], [*first, *service["command"]], {})

    async def outside(self, *words: str) -> str:
        """What `headrace WORDS` prints for the operator, in one more container of the network."""
        name = ["--rm", "--network", self._name, "--user", "0:0", "--volume", f"{self._of('authority')}:/authority:ro"]
        tls = ["--env", "HEADRACE_TLS_DIR=/authority/clients/operator", "--entrypoint", "headrace"]
        return await self._engine.said("run", *self._engine.run_flags, *name, *tls, "headrace-rollout", *words)

    async def in_volume_of(self, service: str, *words: str) -> str:
        """What `headrace WORDS` prints in one more container with what the service's own mounts."""
        return await self._run(service, ["--rm", "--entrypoint", "headrace"], words, {})

    async def inside(self, service: str, *words: str) -> str:
        """What the command prints in the service's container."""
        return await self._engine.said("exec", self._of(service), *words)

    async def kill(self, service: str) -> None:
        """The container ends at once, as when its machine loses power."""
        await self._engine.said("kill", "--signal", "KILL", self._of(service))

    async def again(self, service: str) -> None:
        """The same container, started again."""
        await self._engine.said("start", self._of(service))

    async def stop(self, service: str) -> tuple[int, float]:
        """The container's exit code, and how many seconds it took from SIGTERM to its end."""
        grace = COMPOSE["services"][service]["stop_grace_period"].removesuffix("s")
        began = time.monotonic()
        await self._engine.said("stop", "--time", grace, self._of(service))
        seconds = time.monotonic() - began
        code = (await self.state(service))["ExitCode"]
        assert code != 128 + signal.SIGKILL, f"{service} was killed after {grace} s\n{await self.last_words()}"
        return code, seconds

    async def ended(self, service: str) -> int:
        """Waits for the container's own end; its exit code."""
        return int(await self._engine.said("wait", self._of(service)))

    async def remove(self, service: str) -> None:
        """The container, not its volumes."""
        await self._engine.does("rm", "--force", self._of(service))

    async def state(self, service: str) -> dict[str, Any]:
        """`Running`, `ExitCode` and more, as the engine has them."""
        (found,) = json.loads(await self._engine.said("inspect", self._of(service)))
        return dict(found["State"])

    async def until_healthy(self, service: str) -> float:
        """Seconds until the image's HEALTHCHECK says so. Raises AssertionError when the container ends before it."""
        began = time.monotonic()
        while not await self._is_healthy(service):
            assert (await self.state(service))["Running"], f"{service} ended\n{await self.last_words()}"
            assert time.monotonic() < began + _HEALTHY_SECONDS, f"{service} is not healthy\n{await self.last_words()}"
            await asyncio.sleep(0.5)
        return time.monotonic() - began

    async def last_words(self) -> str:
        """The end of each container's log."""
        logs = []
        for service in SERVICES:
            try:
                tail = await self._engine.said("logs", "--tail", _LAST_LINES, self._of(service), errors=True)
            except AssertionError:
                continue  # it never ran
            logs.append(f"── {service}\n{tail}")
        return "\n".join(logs)

    async def _is_healthy(self, service: str) -> bool:
        if self._engine.is_podman:  # which has no clock of its own for it: systemd's timers are
            return await self._engine.does("healthcheck", "run", self._of(service))
        return bool((await self.state(service))["Health"]["Status"] == "healthy")

    async def _run(self, service: str, name: Sequence[str], words: Sequence[str], variables: Mapping[str, str]) -> str:
        written = COMPOSE["services"][service]
        network = written.get("network_mode", self._name)
        flags = ["--network", network, *(["--network-alias", service] if network == self._name else [])]
        flags += ["--read-only"] * written["read_only"] + ["--init"] * written.get("init", False)
        for key, flag in _LISTS.items():
            flags += [word for value in written.get(key, []) for word in (flag, value)]
        for key, flag in _VALUES.items():
            flags += [flag, written[key]] if key in written else []
        environment = {**written.get("environment", {}), **self._variables, **variables}
        flags += [word for pair in environment.items() for word in ("--env", "=".join(pair))]
        flags += [word for volume in written["volumes"] for word in ("--volume", self._mount(volume))]
        return await self._engine.said("run", *self._engine.run_flags, *name, *flags, written["image"], *words)

    def _mount(self, volume: str) -> str:
        source, path, *mode = volume.split(":")
        here = str(self._job) if source == _JOB else self._of(source)
        return ":".join([here, path, *mode])

    def _of(self, service: str) -> str:
        return f"{self._name}-{service}"


_LISTS = {"tmpfs": "--tmpfs", "cap_drop": "--cap-drop", "cap_add": "--cap-add", "security_opt": "--security-opt"}
_VALUES = {"user": "--user", "shm_size": "--shm-size"}
