"""A job: all options of a run, typed and frozen. An option's name is its flag (`save_hf` is `--save-hf`).

Names are unique over all sections, and every option has an effect. `headrace.job.load` reads TOML, environment and
flags into a job; rules over several options are in `headrace.job.rules.rules`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from headrace.job.schema.section import Above, Bytes, NonNegative, Positive, Seconds, Section, Seed, Share, Temperature
from headrace.job.schema.sound import plain
from headrace.job.schema.training import CriticSection, DistillationSection, HooksSection, TrainSection
from headrace.wire.limits import MAX_ATTEMPTS, MAX_FILE_WORKERS, MAX_SAMPLES_PER_GROUP, MAX_STALENESS


def _several(value: Any) -> Any:
    """Accepts one value where several are allowed."""
    return (str(value),) if isinstance(value, str | Path) else value


def _no_segments(value: Any) -> Any:
    if value == "segments":
        raise ValueError("buffer_store segments can only be read by earlier releases: set buffer_store to sqlite")
    return value


def _one_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError("a run's name is its folder's too: up to 100 letters, digits, '.', '_' and '-', not '.' first")
    return name


Arguments = Annotated[dict[str, Any], AfterValidator(plain)]


class RunSection(Section):
    run_name: Annotated[str, AfterValidator(_one_folder)] = Field("run", description="Names the run and its folder.")
    run_dir: Path = Field(Path("runs"), description="Folder that holds the runs' folders.")
    seed: Seed = Field(1234, description="Seeds Python's, NumPy's and torch's numbers, for what trainer hooks draw.")
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
    ref_load: Path | None = Field(
        None, description="Hugging Face folder of the reference policy; hf_checkpoint if absent."
    )


class DataSection(Section):
    prompt_data: Annotated[tuple[str, ...], BeforeValidator(_several)] = Field(
        (), description="JSONL or parquet of prompts, PATH or PATH@[a:b]; absent: they come by SubmitPrompts only."
    )
    prompt_data_weights: tuple[Above, ...] = Field(
        (), description="Each file's share of every trained batch, relative to the others; absent: equal shares."
    )
    streaming_data: bool = Field(False, description="Read prompt_data in blocks and keep none of it in memory.")
    num_data_workers: Annotated[Positive, Field(le=MAX_FILE_WORKERS)] = Field(
        1, description="Processes that parse a streamed file's blocks ahead."
    )
    data_source_path: str | None = Field(
        None, description="pkg.mod.Class or file.py:Class with get_samples(n), instead of prompt_data."
    )
    input_key: str = Field("prompt", description="Key of the prompt: text, or an array of chat messages.")
    label_key: str | None = Field(None, description="Key of the reference answer.")
    metadata_key: str | None = Field("metadata", description="Key of an object for rewards and hooks.")
    tool_key: str | None = Field(None, description="Key of an array of tool definitions.")
    priority_key: str | None = Field(None, description="Key of an integer; larger goes first with selection priority.")
    apply_chat_template: bool = Field(False, description="Text prompts become one user turn of the chat template.")
    rollout_shuffle: bool = Field(False, description="Walk every epoch in an order of its own.")
    rollout_seed: Seed = Field(42, description="Seeds that order and the engines' sampling.")
    num_epoch: Positive | None = Field(None, description="Walks over prompt_data at most; absent: without end.")
    skip_bad_lines: bool = Field(False, description="Count and pass over lines that do not parse, instead of refusing.")


class RolloutSection(Section):
    num_rollout: Positive = Field(100, description="Rollout steps in the run.")
    rollout_batch_size: Positive | None = Field(None, description="Prompts (groups) in a step; may be derived.")
    n_samples_per_prompt: Annotated[Positive, Field(le=MAX_SAMPLES_PER_GROUP)] | None = Field(
        None, description="Samples in a group; may be derived."
    )
    over_sampling_batch_size: Positive | None = Field(
        None, description="Groups in production for a step, so that it fills in spite of drops; absent: its own."
    )
    rollout_temperature: Temperature = Field(1.0, description="Logits are divided by it.")
    rollout_top_p: Share = Field(1.0, description="Nucleus sampling.")
    rollout_top_k: Positive | None = Field(None, description="Sample from so many tokens; absent: from all.")
    rollout_max_response_len: Positive = Field(1024, description="Response tokens at most.")
    rollout_max_prompt_len: Positive | None = Field(None, description="Longer prompts are dropped, and counted.")
    rollout_max_context_len: Positive | None = Field(None, description="Prompt and response tokens at most.")
    rollout_stop: tuple[str, ...] = Field((), description="Stop strings.")
    rollout_stop_token_ids: tuple[NonNegative, ...] = Field((), description="Token ids that end a response.")
    dynamic_sampling_filter_path: str | None = Field(
        None, description="pkg.mod.fn or file.py:fn that keeps or drops a scored group; dropped ones are replaced."
    )
    partial_rollout: bool = Field(False, description="Keep the tokens of interrupted groups and continue from them.")
    mask_offpolicy_in_partial_rollout: bool = Field(False, description="Do not train those of older policies.")
    custom_generate_function_path: str | None = Field(None, description="pkg.mod.fn or file.py:fn that generates.")
    max_turns: Positive | None = Field(None, description="Turns at most; read by custom generate functions.")
    generate_timeout_seconds: Seconds = Field(600.0, description="Limit of one sample's generation.")
    max_groups_in_flight: Positive | None = Field(
        None, description="Groups generated at once; absent: two steps' worth."
    )
    max_failed_share: Share = Field(
        0.5,
        description="The run ends with the reasons when more of the latest samples than this share failed, or when "
        "none of ten times as many could be used; 1: never.",
    )
    failure_window: Positive | None = Field(
        None, description="Over how many samples that share is taken; absent: one step's, but 32 at least."
    )
    router_policy: Literal["cache_aware", "round_robin", "random", "power_of_two"] = Field(
        "cache_aware", description="How sglang-router picks an engine."
    )


class RewardSection(Section):
    rm_type: str | None = Field(None, description="Scorer of samples whose metadata names none.")
    custom_rm_path: str | None = Field(None, description="pkg.mod.fn or file.py:fn that judges.")
    group_rm: bool = Field(False, description="custom_rm_path takes a whole group and returns a list.")
    reward_model_path: Path | None = Field(None, description="Folder given to a custom_rm_path that is a class.")
    reward_key: str | None = Field(None, description="Which part of a dict reward is trained on.")
    reward_timeout_seconds: Seconds = Field(30.0, description="Limit of scoring one sample.")
    reward_workers: Annotated[Positive, Field(le=1024)] = Field(
        2, description="Worker processes of the reward service."
    )


class BufferSection(Section):
    max_staleness: Annotated[NonNegative, Field(le=MAX_STALENESS)] = Field(
        0, description="Steps a token may be behind: 0 on-policy, 1 one-step-off, k async."
    )
    lease_seconds: Seconds = Field(60.0, description="A producer that is silent for so long loses its groups.")
    max_attempts: Annotated[Positive, Field(le=MAX_ATTEMPTS)] = Field(
        3, description="Leases of a group before it is FAILED."
    )
    buffer_store: Annotated[Literal["memory", "sqlite", "postgres"], BeforeValidator(_no_segments)] = Field(
        "sqlite", description="Where the ledger lives: memory loses it with the process."
    )
    min_free_disk_bytes: Bytes = Field(256 << 20, description="Puts are refused when the disk has less left.")
    buffer_postgres: str | None = Field(
        None, description="URL of the database of buffer_store postgres; its password comes from ~/.pgpass."
    )
    buffer_postgres_wait_seconds: Seconds = Field(
        120.0, description="A database that is away for longer (a failover) ends the buffer; until then it waits."
    )
    buffer_addresses: tuple[str, ...] = Field(
        (), description="host:port of every shard of the ledger, in an order that stays; instead of buffer_address."
    )
    buffer_shard: NonNegative | None = Field(
        None, description="Which of buffer_addresses, from 0, `headrace up buffer` starts here."
    )
    max_payload_bytes: Annotated[Bytes, Field(gt=0)] = Field(
        8 << 30, description="Bytes held at most: payloads, envelopes, prompts, columns."
    )
    prompt_root: Path | None = Field(
        None, description="Folder below which clients may name prompt files; absent: they may name none."
    )
    max_groups: Positive = Field(2_000_000, description="Groups queued, leased, ready and consumed at most.")
    max_calls_per_peer: Positive = Field(40_000, description="Calls that one host may have in progress at the buffer.")
    max_leases: Positive = Field(100_000, description="Leases out at most.")
    retain_steps: Annotated[NonNegative, Field(le=MAX_STALENESS)] = Field(
        100, description="Committed and dropped groups leave memory and store so many steps after their own."
    )
    retain_events: Positive | None = Field(
        None,
        description="Events of the ledger's history that are kept at least; absent: all, which `headrace audit` needs.",
    )
    selection: Literal["fifo", "lifo", "priority", "freshest", "reward", "surprise"] = Field(
        "fifo", description="Which ready groups become the next batch."
    )
    buffer_filter_path: str | None = Field(
        None, description="pkg.mod.fn or file.py:fn that chooses the next batch, instead of selection."
    )
    buffer_hook_timeout_seconds: Seconds = Field(60.0, description="Limit of a call of it, or of data_source_path.")
    expiry_action: Literal["requeue", "drop"] = Field("requeue", description="What becomes of a group too stale.")
    min_size_to_sample: Positive | None = Field(None, description="Ready groups before a step gets its batch.")
    samples_per_insert: Share | None = Field(
        None, description="Aimed at: groups trained for each group made; who is ahead of it waits."
    )
    samples_per_insert_error_buffer: Above | None = Field(
        None, description="Groups that either may be ahead; half a step's batch and one at least."
    )


class PublishSection(Section):
    update_weight_transport: Literal["collective"] = Field("collective", description="How weights travel.")
    update_weight_buffer_size: Annotated[Bytes, Field(gt=0)] = Field(
        512 << 20, description="Bytes in a bucket at most."
    )
    update_weight_pause_mode: Literal["in_place", "retract", "abort"] = Field(
        "in_place", description="What requests in flight do meanwhile."
    )
    update_weight_timeout_seconds: Seconds = Field(300.0, description="A publication that takes longer is aborted.")
    update_weight_probe_tolerance: Above = Field(
        0.5, description="Largest mean log-prob difference of the probe between trainer and engines."
    )
    update_weights_interval: Positive = Field(1, description="Rollout steps between publications.")


class EvalSection(Section):
    eval_prompt_data: tuple[tuple[str, Path], ...] = Field((), description="NAME PATH, repeatable.")
    eval_interval: Positive | None = Field(
        None, description="Rollout steps between evaluations; absent: first and last."
    )
    n_samples_per_eval_prompt: Positive = Field(1, description="Samples of each prompt.")
    eval_temperature: Temperature | None = Field(
        None,
        description="0 is greedy; absent: greedy, or rollout_temperature with several samples a prompt or eval_top_p.",
    )
    eval_top_p: Share | None = Field(None, description="Nucleus sampling; absent: rollout_top_p.")
    eval_top_k: Positive | None = Field(None, description="Sample from so many tokens; absent: rollout_top_k.")
    skip_eval_before_train: bool = Field(False, description="The first evaluation is behind the first eval_interval.")
    eval_max_response_len: Positive | None = Field(None, description="Absent: rollout_max_response_len.")


class CheckpointSection(Section):
    save: Path | None = Field(None, description="Folder of checkpoints; absent: checkpoints/ in the run's folder.")
    load: Path | None = Field(None, description="Folder to resume from; absent: save's, if there is a checkpoint.")
    save_interval: Positive | None = Field(
        None, description="Rollout steps between checkpoints; absent: only the last."
    )
    async_save: bool = Field(False, description="Write checkpoints while the next step trains.")
    keep_last: Positive = Field(2, description="Newest checkpoints that stay.")
    keep_best: NonNegative = Field(0, description="Checkpoints that stay for their step's metric.")
    keep_best_metric: str = Field("reward/mean", description="That metric, e.g. of an evaluation; more is better.")
    initial_megatron_checkpoint: Path | None = Field(
        None, description="A step-… folder of another run, whose weights this one starts with."
    )
    save_hf: Path | None = Field(None, description="Export the final weights as a Hugging Face folder.")
    export_root: Path | None = Field(
        None, description="Folder in which a running trainer may be asked for exports; absent: the run's folder."
    )


class ServicesSection(Section):
    buffer_address: str | None = Field(
        None, description="host:port, or host:port|host:port of a server and its standby; absent: started here."
    )
    rollout_address: str | None = Field(None, description="host:port; absent: started here.")
    reward_address: str | None = Field(None, description="host:port; absent: started here.")
    trainer_address: str | None = Field(None, description="host:port to listen on; absent: a free port.")
    start_timeout_seconds: Seconds = Field(
        1800.0, description="A service or an engine that does not serve by then is given up."
    )
    peer_wait_seconds: Seconds = Field(
        300.0, description="So long the trainer waits for a service that does not answer, and rollout for a score."
    )


class PlacementSection(Section):
    actor_num_nodes: Positive = Field(1, description="Machines of the trainer.")
    actor_num_gpus_per_node: Positive = Field(1, description="Ranks on each (processes, on a CPU machine).")
    rollout_num_gpus: Positive = Field(1, description="GPUs of all engines (processes, on a CPU machine).")
    rollout_num_gpus_per_engine: Positive = Field(1, description="Tensor-parallel size of an engine.")
    colocate: bool = Field(False, description="Trainer and engines share the GPUs.")
    placement: Literal["local", "torchrun", "slurm", "ray"] = Field(
        "local", description="Who starts the trainer's ranks: headrace, torchrun, srun in an allocation, or Ray actors."
    )
    use_fault_tolerance: bool = Field(
        False, description="A trainer that dies starts again from its last checkpoint, and the ledger rewinds with it."
    )
    max_trainer_restarts: NonNegative = Field(5, description="Such restarts within ten minutes.")


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
        description="Text of trained and failed samples in the run's folder, compressed, for `headrace samples`: bytes "
        "at most, the oldest steps go first; 0 writes none.",
    )
    peak_tflops: Above | None = Field(
        None, description="Peak of one rank's device in TFLOP/s, for mfu; absent: a GPU's from a table."
    )


class Job(Section):
    """The root of the tree: one field for each section."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    train: TrainSection = TrainSection()
    critic: CriticSection = CriticSection()
    distillation: DistillationSection = DistillationSection()
    hooks: HooksSection = HooksSection()
    buffer: BufferSection = BufferSection()
    publish: PublishSection = PublishSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    services: ServicesSection = ServicesSection()
    placement: PlacementSection = PlacementSection()
    tracking: TrackingSection = TrackingSection()
    megatron: Arguments = Field({}, description="Megatron-core's own fields, by name; checked by the trainer.")
    sglang: Arguments = Field({}, description="SGLang's ServerArgs, by name; checked by rollout.")
