"""`make bench`: a training step against a bare Megatron loop on the same batch, and rows laid out in three ways.

The bare loop is Megatron-core alone: its GPTModel with its own attention and cross-entropy, its DDP, its schedule and
its Adam on padded micro-batches that are in memory already. Ours is `Policy.train` with GRPO, from samples to updated
weights. All in one process with one thread, rounds taken in turn, medians of CPU seconds, which
say the same on a machine that has other work.

`python -m tests.bench.training_step MODEL` measures only what shared prompts save in a step of a real model. Each
measurement has a process of its own, because memory that was freed stays with its process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.job.megatron import MegatronArgs
from headrace.job.schema.job import Job
from headrace.models.registry import read_architecture
from headrace.trajectory import Sample, Status
from services.trainer.hugging_face.convert import Converter
from services.trainer.megatron.gpt import transformer_config
from services.trainer.megatron.optimizer import Optimizer, wrap_for_data_parallel
from services.trainer.megatron.parallel import Layout
from services.trainer.model.build import join_ranks, policy_of
from services.trainer.model.policy import Policy
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.rows import Packing, row_tokens
from tests.support.models.tiny_model import make_tiny_tokenizer

ROUNDS = 5
VOCAB_SIZE = 8192
MICRO_BATCH = 4

Step = Callable[[], object]


def make_model(folder: Path) -> Path:
    """A random Llama of 5 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def samples(lengths: Sequence[tuple[int, int]], group_size: int) -> list[Sample]:
    """Random tokens; `group_size` samples in a row have one prompt, of the first one's length."""
    random = np.random.default_rng(0)
    found = []
    for number, (_, response) in enumerate(lengths):
        if number % group_size == 0:
            prompt = random.integers(0, VOCAB_SIZE, lengths[number][0])
        tokens = np.concatenate([prompt, random.integers(0, VOCAB_SIZE, response)]).astype(np.int32)
        found.append(
            Sample(
                sample_id=f"s{number}",
                group_id=f"g{number // group_size}",
                index=number % group_size,
                prompt="",
                response="",
                tokens=tokens,
                loss_mask=np.ones(response, dtype=np.uint8),
                rollout_log_probs=np.full(response, -9.0, dtype=np.float32),
                status=Status.COMPLETED,
                reward=float(random.normal()),
            )
        )
    return found


def job(model: Path, **train: Any) -> Job:
    return Job.model_validate(
        {"model": {"hf_checkpoint": model}, "rollout": {"num_rollout": 100}, "train": train, "megatron": {"lr": 1e-6}}
    )


def policy_step(model: Path, layout: Layout, batch: Sequence[Sample], train: Mapping[str, Any]) -> Step:
    """Ours: from samples to updated weights."""
    return step_of(policy_of(job(model, **train), layout), batch)


def step_of(policy: Policy, batch: Sequence[Sample]) -> Step:
    """A step of these samples."""
    by_id = {sample.sample_id: sample for sample in batch}
    facts = [SampleFacts.of(sample.pack().envelope) for sample in batch]
    return lambda: policy.train(0, facts, lambda ids: [by_id[i] for i in ids])


def bare_step(model: Path, layout: Layout, batch: Sequence[Sample]) -> Step:
    """Megatron's: padded tensors in memory, cross-entropy of the responses."""
    args = MegatronArgs.model_validate(job(model).megatron)
    architecture = read_architecture(model)
    config = transformer_config(architecture, args, layout)
    config.finalize_model_grads_func = finalize_model_grads
    network = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=architecture.normalization),
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    Converter(architecture, layout, [network]).load(model)
    wrapped = wrap_for_data_parallel(config, args, [network])[0]
    optimizer = Optimizer(args, [wrapped], 100)
    schedule = get_forward_backward_func()
    micros = [padded(batch[i : i + MICRO_BATCH]) for i in range(0, len(batch), MICRO_BATCH)]

    def forward(feed: Any, network: Any) -> tuple[torch.Tensor, Any]:
        tokens, positions, labels, mask = next(feed)
        losses = network(tokens, positions, None, labels=labels)
        return losses, lambda found: ((found * mask).sum() / mask.sum(), {})

    def step() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward,
            data_iterator=iter(micros),
            model=[wrapped],
            num_microbatches=len(micros),
            seq_length=max(micro[0].shape[1] for micro in micros),
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        optimizer.step()

    return step


def padded(batch: Sequence[Sample]) -> tuple[torch.Tensor, ...]:
    size = max(len(s.tokens) for s in batch) - 1
    tokens, labels = (torch.zeros(len(batch), size, dtype=torch.int64) for _ in range(2))
    mask = torch.zeros(len(batch), size)
    for row, sample in enumerate(batch):
        end = len(sample.tokens) - 1
        tokens[row, :end] = torch.from_numpy(sample.tokens[:-1].astype(np.int64))
        labels[row, :end] = torch.from_numpy(sample.tokens[1:].astype(np.int64))
        mask[row, end - sample.response_length : end] = 1
    return tokens, torch.arange(size).expand(len(batch), size).contiguous(), labels, mask


def measured(steps: Mapping[str, Step]) -> dict[str, float]:
    """Medians in seconds; one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + 1):
        for name, step in steps.items():
            started = time.process_time()
            step()
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def show(title: str, figures: Mapping[str, float], baseline: str) -> None:
    print(f"{title}, median of {ROUNDS}")
    for name, seconds in figures.items():
        print(f"  {name:32} {seconds:8.3f} s   {seconds / figures[baseline]:.2f}×")


def against_bare(model: Path, layout: Layout) -> None:
    """16 samples of 64 + 64 tokens; groups of 4."""
    batch = samples([(64, 64)] * 16, 4)
    ways = {packing: {"micro_batch_size": MICRO_BATCH, "packing": packing} for packing in PACKINGS}
    steps = {f"ours, {name}": policy_step(model, layout, batch, way) for name, way in ways.items()}
    figures = measured({"bare Megatron": bare_step(model, layout, batch)} | steps)
    show("a step of 16 × (64 + 64) tokens", figures, "bare Megatron")


def long_tail(model: Path, layout: Layout) -> None:
    """Log-normal responses behind prompts of 64 tokens: most are short, one is very long; groups of 8."""
    lengths = np.random.default_rng(1).lognormal(3.6, 1.2, 48).clip(4, 900).astype(int)
    batch = samples([(64, int(n)) for n in lengths], 8)
    longest = max(len(s.tokens) for s in batch)
    dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 2 * longest}
    ways: dict[str, Mapping[str, Any]] = {
        "padded, as they come": {"micro_batch_size": 8, "packing": "padded", "balance_data": False},
        "padded, by length": {"micro_batch_size": 8, "packing": "padded"},
        "padded, dynamic": dynamic | {"packing": "padded"},
        "packed, dynamic": dynamic | {"packing": "packed"},
        "shared prompts, dynamic": dynamic | {"packing": "shared_prompts"},
    }
    figures = measured({name: policy_step(model, layout, batch, way) for name, way in ways.items()})
    median = int(np.median(lengths))
    show(
        f"48 responses of {lengths.min()} to {lengths.max()} tokens (median {median})", figures, "padded, as they come"
    )


def shared_prompts(model: Path, layout: Layout) -> None:
    """Long prompts, short answers, groups of 8."""
    batch = samples([(256, 16)] * 32, 8)
    ways = {packing: {"micro_batch_size": 8, "packing": packing} for packing in PACKINGS}
    figures = measured({name: policy_step(model, layout, batch, way) for name, way in ways.items()})
    show("4 prompts of 256 tokens, 8 answers of 16 each", figures, "padded")


PACKINGS = ("padded", "packed", "shared_prompts")


def real_model(model: Path, num_pairs: int) -> None:
    """Packed rows and shared prompts in turn, 8 prompts of 400 tokens with 8 responses of 64 to 128 tokens each."""
    pairs = [(_of_own_process(model, "packed"), _of_own_process(model, "shared_prompts")) for _ in range(num_pairs)]
    print(f"{model.name}: a step of {PROMPTS} prompts of {PROMPT_TOKENS} tokens, {GROUP} responses of each")
    for packing, measurements in zip(("packed", "shared_prompts"), zip(*pairs, strict=True), strict=True):
        said = "   ".join(f"{name} {_range(of[name] for of in measurements)}" for name in measurements[0])
        print(f"  {packing:16} {said}")
    ratios = "   ".join(
        f"{name} {_range((shared[name] / packed[name] for packed, shared in pairs), 2)}×" for name in pairs[0][0]
    )
    print(f"  {'shared ÷ packed':16} {ratios}")


def _range(values: Iterable[float], digits: int = 0) -> str:
    """The smallest and the largest; one number where they read alike."""
    found = sorted(values)
    return "–".join(dict.fromkeys(f"{value:,.{digits}f}" for value in (found[0], found[-1])))


def _of_own_process(model: Path, packing: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.training_step", str(model), "--packing", packing]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def one_step(model: Path, packing: Packing) -> None:
    """Prints what one step takes, as JSON; a step of the first group warms up."""
    lengths = np.random.default_rng(2).integers(64, 129, PROMPTS * GROUP)
    batch = samples([(PROMPT_TOKENS, int(n)) for n in lengths], GROUP)
    config = job(model, micro_batch_size=GROUP, packing=packing)
    policy = policy_of(config, join_ranks(config))
    step_of(policy, batch[:GROUP])()
    step = step_of(policy, batch)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    cpu, started = time.process_time(), time.monotonic()
    step()
    seconds = {"CPU seconds": time.process_time() - cpu, "seconds": time.monotonic() - started}
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    tokens = row_tokens([(s.group_id, s.prompt_length, s.response_length) for s in batch], packing)
    print(json.dumps({"tokens": tokens, **seconds, "MiB at most": int(peak.split()[1]) / 1024}))


PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--packing", choices=PACKINGS, help="measure one step in this process")
    parser.add_argument("--pairs", type=int, default=1, help="steps in turn, of some eight minutes a pair")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.packing:
        one_step(args.model, args.packing)
        return
    if args.model:
        real_model(args.model, args.pairs)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        layout = join_ranks(job(model))
        for bench in (against_bare, long_tail, shared_prompts):
            bench(model, layout)


if __name__ == "__main__":
    main()
