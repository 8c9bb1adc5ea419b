"""What a resolved job will do, for a person to read before it starts."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.config.job import Job
from headrace.config.machine import num_gpus
from headrace.config.megatron import megatron
from headrace.config.rules import ranks
from headrace.launch.specs import SERVICES, address_in

_PACKAGES = ("headrace", "torch", "megatron-core", "transformers", "sglang", "sglang-router", "grpcio")
_FLOAT32 = 4


def plan(job: Job) -> list[tuple[str, str]]:
    """(what, how) in the order of reading."""
    return [
        ("run", f"{job.run.run_dir / job.run.run_name}, seed {job.run.seed}"),
        ("model", f"{job.model.hf_checkpoint}, {_parameters(job.model.hf_checkpoint) / 1e6:,.1f} M parameters"),
        ("services", "; ".join(f"{name} {address_in(job, name) or 'started here'}" for name in SERVICES)),
        ("trainer", _trainer(job)),
        ("engines", _engines(job)),
        ("batch", _batch(job)),
        ("staleness", _staleness(job)),
        ("prompts", _prompts(job)),
        ("reward", job.reward.custom_rm_path or job.reward.rm_type or "by each prompt's metadata.rm_type"),
        ("evaluation", _evaluation(job)),
        ("memory", _memory(job)),
        ("versions", f"Python {sys.version.split()[0]}, {', '.join(_versions())}"),
    ]


def in_short(job: Job) -> str:
    """One line for the moment before it starts."""
    rollout, parameters = job.rollout, _parameters(job.model.hf_checkpoint)
    engines = job.placement.rollout_num_gpus // job.placement.rollout_num_gpus_per_engine
    return (
        f"{job.model.hf_checkpoint.name}, {parameters / 1e6:,.1f} M parameters: {rollout.num_rollout} steps of "
        f"{rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} samples, "
        f"{_count(ranks(job), 'trainer rank')}, {_count(engines, 'engine')}, {_meaning(job.buffer.max_staleness)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _trainer(job: Job) -> str:
    args = megatron(job)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    data = ranks(job) // (tensor * pipeline * args.context_parallel_size)
    where = f"{'GPUs' if num_gpus() else 'CPU processes'}, placement {job.placement.placement}"
    layout = f"data {data} x tensor {tensor} x pipeline {pipeline}"
    return f"{ranks(job)} ranks ({where}): {layout}; lr {args.lr:g} {args.lr_decay_style}"


def _engines(job: Job) -> str:
    each = job.placement.rollout_num_gpus_per_engine
    count = job.placement.rollout_num_gpus // each
    return f"{count} behind the router ({job.rollout.router_policy}), {each} tensor-parallel processes in each"


def _batch(job: Job) -> str:
    rollout, train = job.rollout, job.train
    return (
        f"{rollout.num_rollout} steps of {rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} samples"
        f" = {train.num_steps_per_rollout} optimizer steps x {train.global_batch_size} samples"
    )


def _staleness(job: Job) -> str:
    staleness = job.buffer.max_staleness
    return f"at most {staleness} steps ({_meaning(staleness)})"


def _meaning(staleness: int) -> str:
    return {0: "synchronous, on-policy", 1: "one step off"}.get(staleness, "asynchronous")


def _prompts(job: Job) -> str:
    files, weights = job.data.prompt_data, job.data.prompt_data_weights
    if not files:
        return "by SubmitPrompts only (headrace submit)"
    if len(files) == 1:
        return files[0]
    shares = weights or (1.0,) * len(files)
    return ", ".join(f"{share / sum(shares):.0%} {file}" for file, share in zip(files, shares, strict=True))


def _evaluation(job: Job) -> str:
    if not job.eval.eval_prompt_data:
        return "none"
    interval = job.eval.eval_interval
    every = f"every {interval} steps" if interval else "before the first and after the last step"
    return f"{', '.join(name for name, _ in job.eval.eval_prompt_data)}: {every}"


def _memory(job: Job) -> str:
    """Weights, gradients, optimizer and engines; activations and the ledger come on top."""
    args = megatron(job)
    parameters = _parameters(job.model.hf_checkpoint)
    shared = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    # float32 weights, gradients and Adam's two moments; in bfloat16 a float32 master copy is kept beside them.
    weights_and_gradients, optimizer = (2 + _FLOAT32, 3 * _FLOAT32) if args.bf16 else (2 * _FLOAT32, 2 * _FLOAT32)
    data = ranks(job) // (shared * args.context_parallel_size)
    optimizer_share = optimizer / data if args.use_distributed_optimizer else optimizer
    reference = (2 if args.bf16 else _FLOAT32) if job.train.use_kl_loss else 0
    rank = parameters / shared * (weights_and_gradients + optimizer_share + reference)
    engine = parameters * (2 if args.bf16 else _FLOAT32)
    return (
        f"about {_gigabytes(rank)} for each rank and {_gigabytes(engine)} for an engine's weights, "
        "before activations, KV cache and the ledger"
    )


def _parameters(folder: Path) -> int:
    """Elements of all tensors, from the headers of the safetensors files."""
    return sum(_elements(file) for file in folder.glob("*.safetensors"))


def _elements(file: Path) -> int:
    with file.open("rb") as data:
        header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            elements = 1
            for length in tensor["shape"]:
                elements *= length
            total += elements
    return total


def _versions() -> Sequence[str]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return found


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:,.0f} GB"
