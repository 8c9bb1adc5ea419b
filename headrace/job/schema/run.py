"""The sections of the run itself: its name, model, publications, checkpoints, tracking, recorded steps; its secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from headrace.job.schema.section import Above, Bytes, NonNegative, Positive, Seconds, Section, Seed


def _one_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError("a run's name is its folder's too: up to 100 letters, digits, '.', '_' and '-', not '.' first")
    return name


class RunSection(Section):
    run_name: Annotated[str, AfterValidator(_one_folder)] = "run"
    """Names the run and its folder."""
    run_dir: Path = Path("runs")
    """Folder that holds the runs' folders."""
    seed: Seed = 1234
    """Seed of Python's, NumPy's and torch's random numbers, which trainer hooks may draw."""
    slime_imports: bool = False
    """Let hooks import slime's names (slime.utils.types.Sample, slime.rollout.sglang_rollout.GenerateState,
    slime.utils.http_utils.post, …): they get headrace's own. docs/hooks.md lists them."""

    @property
    def folder(self) -> Path:
        """The run's own folder, which all machines of its trainer share."""
        return self.run_dir / self.run_name


class ModelSection(Section):
    model: str | None = None
    """A name of `headrace models`: hf_checkpoint must be that model, and its parallel sizes are taken where the job
    gives none."""
    hf_checkpoint: Path
    """Hugging Face folder: weights, config, tokenizer. Or OWNER/NAME of the hub, which is downloaded once."""
    trust_remote_code: bool = False
    """Run the code that hf_checkpoint brings for its tokenizer: in the rollout service, its check, and where a hook
    uses headrace.hooks.kit. Engines have --sglang-trust-remote-code; no other process runs any."""
    ref_load: Path | None = None
    """Hugging Face or torch_dist folder of the reference policy; the starting weights if absent."""


class PublishSection(Section):
    update_weight_transport: Literal["auto", "collective", "disk", "ipc", "adapter"] = "auto"
    """How weights reach the engines: broadcast in a collective group, through files in update_weight_disk_path, or, on
    one machine, through its shared memory (ipc). That holds two versions. With LoRA `adapter` sends the adapters alone,
    through files: engines load them beside those in use, and none stands still. `auto` is ipc for a run that starts its
    services and engines on this machine without GPUs, else collective, or disk for engines that cannot join a group."""
    update_weight_delta: bool = False
    """With transports collective and disk: send only the values that changed since the version that engines have,
    bit by bit. Senders keep a copy of the served weights in host memory. Where much changed, as in float32, all are
    sent."""
    update_weight_disk_path: Path | None = None
    """With transports disk and adapter: folder of the versions. Several runs may use one. Trainer, rollout service and
    engines must see it at this path on their machines; absent: weights/ in the run's folder. It holds two versions of
    each run during a publication, and then the one that is served."""
    update_weight_buffer_size: Annotated[Bytes, Field(gt=0)] = 512 << 20
    """Largest number of bytes in a bucket of weights, or in a file of them."""
    update_weight_pause_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """What happens to requests in flight during a publication."""
    update_weight_timeout_seconds: Seconds = 300.0
    """A publication that takes longer is aborted."""
    update_weight_probe_tolerance: Above = 0.5
    """Largest mean log-prob difference of the probe between trainer and engines."""
    update_weight_rollback: Literal["none", "host"] = "none"
    """What engines are given when new weights cannot be had: nothing, or the weights that were served before, of which
    each sender keeps a copy in host memory. With the other transports they load those from their folder in any
    case."""
    update_weights_interval: Positive = 1
    """Rollout steps between publications."""

    @property
    def is_broadcast(self) -> bool:
        """`auto` is decided when a job is loaded; a job that was made otherwise has not said that it wants files."""
        return self.update_weight_transport in ("auto", "collective")


class CheckpointSection(Section):
    save: Path | None = None
    """Folder of checkpoints; absent: checkpoints/ in the run's folder."""
    load: Path | None = None
    """Folder to resume from; absent: save's, if there is a checkpoint. Megatron's own (torch_dist) gives its weights
    alone."""
    save_interval: Positive | None = None
    """Rollout steps between checkpoints; absent: only the last."""
    async_save: bool = False
    """Write checkpoints while the next step trains."""
    keep_last: Positive = 2
    """Number of newest checkpoints that are kept."""
    keep_best: NonNegative = 0
    """Number of checkpoints that are kept for their step's keep_best_metric."""
    keep_best_metric: str = "reward/mean"
    """Metric of keep_best, e.g. of an evaluation; more is better."""
    initial_megatron_checkpoint: Path | None = None
    """Megatron's torch_dist folder, or a step-… folder of another run, with whose weights this run starts."""
    save_hf: Path | None = None
    """Export the final weights as a Hugging Face folder."""
    export_root: Path | None = None
    """Folder in which a running trainer may be asked for exports; absent: the run's folder."""


class TrackingSection(Section):
    use_tensorboard: bool = True
    """Write TensorBoard events into the run's folder."""
    use_wandb: bool = False
    """Report to Weights & Biases; its key is in WANDB_API_KEY or ~/.netrc."""
    wandb_project: str = "headrace"
    """W&B's project."""
    wandb_group: str | None = None
    """W&B's group of runs."""
    wandb_team: str | None = None
    """W&B's entity; absent: the key's own."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline: into the run's folder, for wandb sync."""
    use_trackio: bool = False
    """Report to trackio: in its own folder (TRACKIO_DIR), or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says."""
    trackio_project: str = "headrace"
    """trackio's project."""
    use_mlflow: bool = False
    """Report to MLflow: in the run's folder, or where MLFLOW_TRACKING_URI says."""
    sample_log_bytes: Bytes = 1 << 30
    """Most bytes of compressed samples in the run's folder, for `headrace samples` and `headrace view`: text of all,
    tokens of some. The oldest steps go first; 0 writes none."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the samples that are traced by OpenTelemetry, for `headrace trace`; 0 traces nothing. Spans go into
    traces/ in the run's folder, or to OTEL_EXPORTER_OTLP_ENDPOINT."""
    peak_tflops: Above | None = None
    """Peak of one rank's device in TFLOP/s, for mfu; absent: a GPU's from a table."""


_NUMBER = "{rollout_id}"


def _numbered(path: str) -> str:
    if _NUMBER not in path:
        raise ValueError(f"each rollout step has a file of its own: write {_NUMBER} where its number belongs")
    return path


_STEPS = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


def _steps(text: str) -> range:
    found = _STEPS.fullmatch(text)
    steps = range(int(found[1]), int(found[2])) if found else range(0)
    if not steps or steps[0] < 1:
        raise ValueError("write FIRST:END, steps from 1 on without the last: 10:12 is steps 10 and 11")
    return steps


def _is_steps(text: str) -> str:
    _steps(text)
    return text


StepFiles = Annotated[str, AfterValidator(_numbered)]
"""Files by rollout step: `{rollout_id}` in it is the step's number, from 0."""


class DebugSection(Section):
    save_debug_rollout_data: StepFiles | None = None
    """Keep what each rollout step is trained on, as files: recorded/{rollout_id}.samples, say."""
    load_debug_rollout_data: StepFiles | None = None
    """Train on the rollout steps kept in these files, without engines, rewards and a buffer."""
    debug_train_only: bool = False
    """Train without engines, on load_debug_rollout_data, which says so by itself."""
    profile_steps: Annotated[str, AfterValidator(_is_steps)] | None = None
    """Profile the training of these steps with PyTorch's profiler, a file for each step and rank in profile/ of the
    run's folder: 10:12 is steps 10 and 11 of metrics.jsonl. On a GPU with a snapshot of its memory, too."""
    debug_rollout_only: bool = False
    """Generate and score num_rollout steps with the weights of hf_checkpoint, and train nothing."""

    @property
    def profiled_steps(self) -> range:
        return _steps(self.profile_steps) if self.profile_steps else range(0)

    @property
    def trains_alone(self) -> bool:
        """The trainer is the only service."""
        return self.load_debug_rollout_data is not None


STEP_FILES = ("save_debug_rollout_data", "load_debug_rollout_data")
"""Options that name files by step."""


HIDDEN = "***"
_PASSWORD = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")
_SECRET_NAME = re.compile(r"(^|_)(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_NOT_SECRET = frozenset({"input_key", "label_key", "metadata_key", "tool_key", "reward_key", "priority_key"})
"""Leaves that name a key of a JSON object."""


def without_secrets(tree: Any, name: str = "") -> Any:
    """A copy of a tree of plain values without secrets, for a tracker or a bug report."""
    if isinstance(tree, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secrets(value, name) for value in tree]
    if isinstance(tree, str):
        return HIDDEN if _is_secret(name) else _PASSWORD.sub(HIDDEN, tree)
    return tree


def passwords(tree: Any, name: str = "") -> list[str]:
    """Names of values that are URLs with a password."""
    if isinstance(tree, Mapping):
        return [found for key, value in tree.items() for found in passwords(value, str(key))]
    if isinstance(tree, list | tuple):
        return [found for value in tree for found in passwords(value, name)]
    return [name] if isinstance(tree, str) and _PASSWORD.search(tree) else []


def _is_secret(name: str) -> bool:
    return name not in _NOT_SECRET and _SECRET_NAME.search(name) is not None
