"""Sections of the run itself: its name, model, publications, checkpoints, services, placement and tracking."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from headrace.job.schema.engine_group import EngineGroup
from headrace.job.schema.literal import FromJson
from headrace.job.schema.nodes import NodeOptions
from headrace.job.schema.section import Above, Bytes, NonNegative, Positive, Seconds, Section, Seed
from headrace.wire.limits import MAX_ROLLOUT_SERVICES


def _one_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError("a run's name is its folder's too: up to 100 letters, digits, '.', '_' and '-', not '.' first")
    return name


class RunSection(Section):
    run_name: Annotated[str, AfterValidator(_one_folder)] = Field("run", description="Names the run and its folder.")
    run_dir: Path = Field(Path("runs"), description="Folder that holds the runs' folders.")
    seed: Seed = Field(
        1234, description="Seed of Python's, NumPy's and torch's random numbers, which trainer hooks may draw."
    )
    first_batch_seconds: Seconds = Field(
        30.0,
        description="How long the first batch should take. When it takes ten times as long (later ones: ten times the "
        "usual wait), the console says what the trainer waits for, and on whom.",
    )


class ModelSection(Section):
    model: str | None = Field(
        None,
        description="A name of `headrace models`: hf_checkpoint must be that model, and its parallel sizes are taken "
        "where the job gives none.",
    )
    hf_checkpoint: Path = Field(description="Hugging Face folder: weights, config, tokenizer.")
    trust_remote_code: bool = Field(
        False,
        description="Run the code that hf_checkpoint brings for its tokenizer: in the rollout service, its check, and "
        "where a hook uses headrace.hooks.kit. Engines have --sglang-trust-remote-code; no other process runs any.",
    )
    ref_load: Path | None = Field(
        None,
        description="Hugging Face or torch_dist folder of the reference policy; the starting weights if absent.",
    )


class PublishSection(Section):
    update_weight_transport: Literal["collective", "disk", "ipc"] = Field(
        "collective",
        description="How weights reach the engines: broadcast in a collective group, through files in "
        "update_weight_disk_path, or, on one machine, through its shared memory (ipc). That holds two versions.",
    )
    update_weight_disk_path: Path | None = Field(
        None,
        description="With transport disk: folder of the versions, for this run alone. Trainer, rollout service and "
        "engines must see it at this path on their machines; absent: weights/ in the run's folder. It holds two "
        "versions during a publication, and then the one that is served.",
    )
    update_weight_buffer_size: Annotated[Bytes, Field(gt=0)] = Field(
        512 << 20, description="Largest number of bytes in a bucket of weights, or in a file of them."
    )
    update_weight_pause_mode: Literal["in_place", "retract", "abort"] = Field(
        "in_place", description="What happens to requests in flight during a publication."
    )
    update_weight_timeout_seconds: Seconds = Field(300.0, description="A publication that takes longer is aborted.")
    update_weight_probe_tolerance: Above = Field(
        0.5, description="Largest mean log-prob difference of the probe between trainer and engines."
    )
    update_weight_rollback: Literal["none", "host"] = Field(
        "none",
        description="What engines are given when new weights cannot be had: nothing, or the weights that were served "
        "before, of which each sender keeps a copy in host memory. With transports disk and ipc they load those from "
        "their folder in any case.",
    )
    update_weights_interval: Positive = Field(1, description="Rollout steps between publications.")


class CheckpointSection(Section):
    save: Path | None = Field(None, description="Folder of checkpoints; absent: checkpoints/ in the run's folder.")
    load: Path | None = Field(
        None,
        description="Folder to resume from; absent: save's, if there is a checkpoint. Megatron's own "
        "(torch_dist) gives its weights alone.",
    )
    save_interval: Positive | None = Field(
        None, description="Rollout steps between checkpoints; absent: only the last."
    )
    async_save: bool = Field(False, description="Write checkpoints while the next step trains.")
    keep_last: Positive = Field(2, description="Number of newest checkpoints that are kept.")
    keep_best: NonNegative = Field(
        0, description="Number of checkpoints that are kept for their step's keep_best_metric."
    )
    keep_best_metric: str = Field(
        "reward/mean", description="Metric of keep_best, e.g. of an evaluation; more is better."
    )
    initial_megatron_checkpoint: Path | None = Field(
        None,
        description="Megatron's torch_dist folder, or a step-… folder of another run, with whose weights this run "
        "starts.",
    )
    save_hf: Path | None = Field(None, description="Export the final weights as a Hugging Face folder.")
    export_root: Path | None = Field(
        None, description="Folder in which a running trainer may be asked for exports; absent: the run's folder."
    )


class ServicesSection(Section):
    buffer_address: str | None = Field(
        None, description="host:port, or host:port|host:port of a server and its standby; absent: started here."
    )
    rollout_address: str | None = Field(
        None, description="host:port, or host:port,host:port of several rollout services; absent: started here."
    )
    rollout_services: Annotated[Positive, Field(le=MAX_ROLLOUT_SERVICES)] = Field(
        1,
        description="Rollout services on the one ledger that are started here, each with engines, a router and "
        "producers of its own: the trainer publishes to all of them, and one may die while the others go on.",
    )
    rollout_service: NonNegative | None = Field(
        None, description="Which of several in rollout_address, from 0, `headrace up rollout` starts here."
    )
    reward_address: str | None = Field(None, description="host:port; absent: started here.")
    trainer_address: str | None = Field(None, description="host:port to listen on; absent: a free port.")
    service_host: str | None = Field(
        None,
        description="This machine's address, at which other machines reach the services that are started here without "
        "an address of their own; absent: 127.0.0.1, which only this machine reaches.",
    )
    listen_host: str | None = Field(
        None,
        description="Host on which services started here listen, where it is not that of their addresses: 0.0.0.0 or "
        ":: in a container, whose address is a name that others know.",
    )
    metrics_port: Annotated[Positive, Field(le=65_535)] | None = Field(
        None,
        description="Port of /metrics, for Prometheus, where `headrace up` starts one process: on the host on which "
        "that listens. Absent: a free port that only this machine reaches, named in services.json of the run's folder.",
    )
    tls_dir: Path | None = Field(
        None,
        description="Folder of ca.pem, cert.pem and key.pem (`headrace certs`): calls between services, and metrics, "
        "are encrypted, and both sides show a certificate. Absent: neither, on addresses that only this machine "
        "reaches.",
    )
    tokens_file: Path | None = Field(
        None,
        description="Tokens of callers, and their roles (`headrace tokens`): a caller sends one with each call. With "
        "tls_dir for those whose certificate names no role, or beside one that does; without it on addresses that "
        "only this machine reaches.",
    )
    insecure: bool = Field(
        False,
        description="Listen where other machines can reach without tls_dir: for a network that nobody else is in.",
    )
    buffer_python: str | None = Field(
        None, description="Python of the buffer, or a command that ends with one; absent: headrace's."
    )
    reward_python: str | None = Field(
        None, description="Python of the reward service, or a command that ends with one; absent: headrace's."
    )
    rollout_python: str | None = Field(
        None,
        description="Python of the rollout service and engines, or a command that ends with one; absent: headrace's.",
    )
    trainer_python: str | None = Field(
        None, description="Python of the trainer's ranks, or a command that ends with one; absent: headrace's."
    )
    start_timeout_seconds: Seconds = Field(
        1800.0, description="A service or an engine that does not serve within this time is given up."
    )
    peer_wait_seconds: Seconds = Field(
        300.0, description="The trainer waits this long for a service that does not answer, and rollout for a score."
    )

    def python_of(self, service: str) -> Sequence[str]:
        """The words before `-m services.SERVICE`."""
        given = {
            "buffer": self.buffer_python,
            "reward": self.reward_python,
            "rollout": self.rollout_python,
            "trainer": self.trainer_python,
        }[service]
        return [sys.executable] if given is None else shlex.split(given)

    @property
    def own_host(self) -> str:
        """The host of services that are started here without an address."""
        return (self.service_host or "127.0.0.1").strip("[]")

    @property
    def num_rollout_services(self) -> int:
        """The number of rollout services, wherever they are started."""
        return len(self.rollout_address.split(",")) if self.rollout_address else self.rollout_services


class PlacementSection(NodeOptions):
    actor_num_nodes: Positive = Field(1, description="Machines for the trainer.")
    actor_num_gpus_per_node: Positive = Field(
        1, description="The trainer's ranks on each machine: GPUs, or processes on a machine without."
    )
    num_gpus_per_node: Positive | None = Field(
        None,
        description="GPUs of a machine that the job may use, nearest to each other first; absent: all that are there. "
        "In a check for other machines, the number that each has.",
    )
    rollout_num_gpus: Positive = Field(
        1,
        description="GPUs of all engines of a rollout service together, or processes on a machine without.",
    )
    rollout_num_gpus_per_engine: Positive = Field(1, description="Tensor-parallel size of an engine.")
    engine_groups: tuple[Annotated[EngineGroup, FromJson], ...] = Field(
        (),
        description="Engines with arguments of their own: tables [[placement.engine_groups]] in the job file, or JSON "
        "objects, each with name, num_engines or num_gpus, num_gpus_per_engine, and overrides of SGLang's arguments.",
    )
    sglang_config: Path | None = Field(
        None, description="YAML file of slime's form with one model, whose server_groups are read as engine_groups."
    )
    rollout_max_engines: Positive | None = Field(
        None,
        description="Most engines that `headrace rollout scale` may ask for; absent: on GPUs those of "
        "rollout_num_gpus, on a CPU what its free memory has room for.",
    )
    rollout_external_engine_addrs: tuple[str, ...] = Field(
        (),
        description="host:port of SGLang servers that are started elsewhere, in place of engines started here; several "
        "rollout services divide them, in their order.",
    )
    colocate: bool = Field(False, description="Trainer and engines take turns on the same GPUs, of one machine.")
    offload_train: bool | None = Field(
        None, description="With colocate: the trainer's memory is in the host's while engines generate; absent: on."
    )
    offload_rollout: bool | None = Field(
        None, description="With colocate: engines give up weights and KV cache while the trainer trains; absent: on."
    )
    placement: Literal["local", "torchrun", "slurm", "ray"] = Field(
        "local", description="Who starts the trainer's ranks: headrace, torchrun, srun in an allocation, or Ray actors."
    )
    rollout_placement: Literal["local", "ray"] = Field(
        "local",
        description="Who starts the engines: the rollout service on its machine, or Ray actors on machines of the "
        "cluster of RAY_ADDRESS. Those listen on their machine's address, without a key.",
    )
    use_fault_tolerance: bool = Field(
        False, description="A trainer that dies starts again from its last checkpoint, and the ledger rewinds with it."
    )
    max_trainer_restarts: NonNegative = Field(
        5, description="Restarts of the trainer within ten minutes before the run fails."
    )
    max_engine_restarts: NonNegative = Field(
        5,
        description="Restarts of an engine that each time ends within ten minutes, before it stays down; when all "
        "engines do, the rollout service ends and says why.",
    )
    rollout_health_check_interval: Seconds = Field(2.0, description="Seconds between checks of an engine or router.")
    rollout_health_check_timeout: Seconds = Field(10.0, description="A check that is not answered within it is missed.")
    rollout_health_check_misses: Positive = Field(
        5, description="Checks missed in a row before an engine or the router is ended and replaced."
    )

    @property
    def num_engines(self) -> int:
        """The engines behind the router, whoever starts them."""
        if self.engine_groups:
            return sum(group.count for group in self.engine_groups)
        return len(self.rollout_external_engine_addrs) or self.rollout_num_gpus // self.rollout_num_gpus_per_engine

    @property
    def engine_sizes(self) -> tuple[int, ...]:
        """The tensor-parallel sizes of its engines, the smallest first."""
        sizes = {group.size for group in self.engine_groups} or {self.rollout_num_gpus_per_engine}
        return tuple(sorted(sizes))

    @property
    def num_ranks(self) -> int:
        """The number of the trainer's processes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node


class TrackingSection(Section):
    use_tensorboard: bool = Field(True, description="Write TensorBoard events into the run's folder.")
    use_wandb: bool = Field(False, description="Report to Weights & Biases; its key is in WANDB_API_KEY or ~/.netrc.")
    wandb_project: str = Field("headrace", description="W&B's project.")
    wandb_group: str | None = Field(None, description="W&B's group of runs.")
    wandb_team: str | None = Field(None, description="W&B's entity; absent: the key's own.")
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="Offline: into the run's folder, for wandb sync."
    )
    sample_log_bytes: Bytes = Field(
        1 << 30,
        description="Most bytes of compressed text of trained and failed samples in the run's folder, for `headrace "
        "samples`; the oldest steps go first, 0 writes none.",
    )
    peak_tflops: Above | None = Field(
        None, description="Peak of one rank's device in TFLOP/s, for mfu; absent: a GPU's from a table."
    )
