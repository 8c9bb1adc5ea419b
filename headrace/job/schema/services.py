"""The sections of a job for its services: where they are, the buffer's limits and store, and what scores samples."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from headrace.job.schema.section import (
    Above,
    Bytes,
    FromJson,
    NonNegative,
    Port,
    Positive,
    Score,
    Seconds,
    Section,
    Share,
    Url,
    normalize,
)
from headrace.limits import MAX_NAME_CHARACTERS, MAX_ROLLOUT_SERVICES, MAX_SHARDS, MAX_STALENESS


class ServicesSection(Section):
    buffer_address: str | None = None
    """host:port, or host:port|host:port of a server and its standby; of several shards host:port,host:port in an order
    that never changes. Absent: started here."""
    rollout_address: str | None = None
    """host:port, or host:port,host:port of several rollout services; absent: started here."""
    rollout_services: Annotated[Positive, Field(le=MAX_ROLLOUT_SERVICES)] = 1
    """Rollout services on the one ledger that are started here, each with engines, a router and producers of its own:
    the trainer publishes to all of them, and one may die while the others go on."""
    rollout_service: NonNegative | None = None
    """Which of several in rollout_address, from 0, `headrace up rollout` starts here."""
    reward_address: str | None = None
    """host:port; absent: started here."""
    trainer_address: str | None = None
    """host:port to listen on; absent: a free port."""
    service_host: str | None = None
    """This machine's address, at which other machines reach the services that are started here without an address of
    their own; absent: 127.0.0.1, which only this machine reaches."""
    listen_host: str | None = None
    """Host on which services started here listen, where it is not that of their addresses: 0.0.0.0 or :: in a
    container, whose address is a name that others know."""
    metrics_port: Port | None = None
    """Port of /metrics, for Prometheus, where `headrace up` starts one process: on the host on which that listens.
    Absent: a free port that only this machine reaches, named in services.json of the run's folder."""
    tls_dir: Path | None = None
    """Folder of ca.pem, cert.pem and key.pem (`headrace certs`): calls between services, and metrics, are encrypted,
    and both sides show a certificate. Absent: neither, on addresses that only this machine reaches."""
    tokens_file: Path | None = None
    """Tokens of callers, and their roles (`headrace tokens`): a caller sends one with each call. With tls_dir for those
    whose certificate names no role, or beside one that does; without it on addresses that only this machine reaches."""
    insecure: bool = False
    """Listen where other machines can reach without tls_dir: for a network that nobody else is in."""
    buffer_python: str | None = None
    """Python of the buffer, or a command that ends with one; absent: headrace's."""
    reward_python: str | None = None
    """Python of the reward service, or a command that ends with one; absent: headrace's."""
    rollout_python: str | None = None
    """Python of the rollout service and engines, or a command that ends with one; absent: headrace's."""
    trainer_python: str | None = None
    """Python of the trainer's ranks, or a command that ends with one; absent: headrace's."""
    start_timeout_seconds: Seconds = 1800.0
    """A service or an engine that does not serve within this time is given up."""

    def python_of(self, service: str) -> Sequence[str]:
        """The words before `-m services.SERVICE`."""
        given: str | None = getattr(self, f"{service}_python")
        return [sys.executable] if given is None else shlex.split(given)

    @property
    def own_host(self) -> str:
        """The host of services that are started here without an address."""
        return (self.service_host or "127.0.0.1").strip("[]")

    @property
    def num_rollout_services(self) -> int:
        """The number of rollout services, wherever they are started."""
        return len(self.rollout_address.split(",")) if self.rollout_address else self.rollout_services


def _no_segments(value: Any) -> Any:
    if value == "segments":
        raise ValueError("buffer_store segments can only be read by earlier releases: set buffer_store to sqlite")
    return value


class TinkerSection(Section):
    tinker_port: Port | None = None
    """Port of Tinker's API (`headrace serve tinker`): clients of the package tinker train models of LoRA on
    hf_checkpoint, and the run has no prompts and no steps of its own."""
    tinker_host: str = "127.0.0.1"
    """Host on which Tinker's API listens."""
    tinker_models: Annotated[Positive, Field(le=MAX_SHARDS)] = 8
    """Models that clients have at once; each has its matrices and Adam's state in the trainer's memory."""
    tinker_model_name: str | None = None
    """What clients call the base, beside its folder and the folder's name."""


class BufferSection(Section):
    max_staleness: Annotated[NonNegative, Field(le=MAX_STALENESS)] = 0
    """Steps that a token's policy may be behind: 0 on-policy, 1 one-step-off, k asynchronous."""
    buffer_store: Annotated[Literal["memory", "sqlite", "postgres"], BeforeValidator(_no_segments)] = "sqlite"
    """Where the ledger is stored; memory loses it with the process."""
    buffer_postgres: str | None = None
    """URL of the database of buffer_store postgres; its password comes from ~/.pgpass."""
    buffer_shards: Annotated[Positive, Field(le=MAX_SHARDS)] = 1
    """Buffers that share one ledger and are started here; a ledger keeps its number of shards."""
    buffer_shard: NonNegative | None = None
    """Which of several in buffer_address, from 0, `headrace up buffer` starts here."""
    max_payload_bytes: Annotated[Bytes, Field(gt=0)] = 8 << 30
    """Largest sum of stored bytes: payloads, envelopes, prompts, columns."""
    prompt_root: Path | None = None
    """Folder below which clients may name prompt files; absent: they may name none."""
    retain_events: Positive | None = None
    """Events of the ledger's history that are at least kept; absent: all, which `headrace audit` needs."""
    selection: Literal["fifo", "lifo", "priority", "freshest", "reward", "surprise"] = "fifo"
    """Which ready groups become the next batch."""
    buffer_filter_path: str | None = None
    """pkg.mod.fn or file.py:fn that chooses the next batch, in place of selection."""
    min_size_to_sample: Positive | None = None
    """Number of ready groups before a step gets its batch."""
    samples_per_insert: Share | None = None
    """Target number of trained groups for each generated group. The side that is more than a step's batch
    ahead waits."""


def _ordered(clip: tuple[float, float]) -> tuple[float, float]:
    if clip[0] > clip[1]:
        raise ValueError(f"should be the least and the most, not {clip[0]:g} and {clip[1]:g}")
    return clip


Clip = Annotated[tuple[Score, Score], AfterValidator(_ordered)]


class RewardPart(Section):
    """One part of a composed reward."""

    scorer: str
    """A built-in scorer, a function (file.py:fn or pkg.mod.fn), or grpc://HOST:PORT/SCORER."""
    name: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    weight: Score | None = None
    """Absent: 1, and 0 for a gate, which does not count then."""
    gate: Score | None = None
    key: str | None = None
    """The part of a dict reward."""
    clip: Clip | None = None
    when: Annotated[dict[str, Any], AfterValidator(normalize)] = Field({})
    metadata_overrides: Annotated[dict[str, Any], AfterValidator(normalize)] = Field({})
    """Laid over the row's metadata for this scorer alone: its settings."""


class RewardSection(Section):
    rm_type: str | None = None
    """Scorer of samples whose metadata names none."""
    custom_rm_path: str | None = None
    """pkg.mod.fn or file.py:fn that scores samples."""
    group_rm: bool = False
    """custom_rm_path takes a whole group and returns a list."""
    reward_model_path: Path | None = None
    """Folder given to a custom_rm_path that is a class."""
    reward_parts: tuple[Annotated[RewardPart, FromJson], ...] = ()
    """A reward of several parts: tables [[reward.reward_parts]] in the job file, or JSON objects, each with a scorer. A
    part may have name, weight, gate, key, clip, when and metadata_overrides."""
    reward_combine: Literal["sum", "min", "max"] = "sum"
    """How reward_parts become one reward."""
    reward_clip: Clip | None = None
    """The least and the most that reward_parts together give; a closed gate gives 0."""
    reward_key: str | None = None
    """The part of a dict reward that is trained on."""
    skip_label_check: bool = False
    """Start although the labels that were tried score 0 as their own answers."""
    reward_timeout_seconds: Seconds = 30.0
    """Limit of scoring one sample."""
    reward_patience_seconds: Seconds = 300.0
    """How long finished samples wait for a reward service, or for a scorer's server, that cannot be reached; then they
    fail. Meanwhile the ledger holds them, and the rollout service may be killed."""
    reward_workers: Annotated[Positive, Field(le=1024)] = 2
    """Worker processes of the reward service."""
    insecure_sandbox: bool = False
    """Where bubblewrap does not work, run the policy's programs (rm_type code, run_python) as processes with limits,
    which can read what their user can. Without it they are refused there. As root, each is a user of its own."""
    rm_url: Url | None = None
    """URL that scorer remote_rm sends prompt, response, label and metadata, for a reward; of scorer nemo_gym, the
    resource server."""
    judge_url: Url | None = None
    """Base URL, with /v1, of the OpenAI-compatible server that scorer judge asks; its key is in HEADRACE_JUDGE_KEY."""
    judge_model: str | None = None
    """The model that scorer judge asks for."""
    judge_prompt: Path | None = None
    """File of what the judge is told, with {prompt}, {response}, {label}; absent: a plain one."""
    judge_scale: Above = 10.0
    """The highest grade that the judge gives; it is a reward of 1."""
    judge_json: bool = False
    """Ask the judge for JSON with a grade, by response_format; its server must know that."""
