"""A step's figures: trained tokens, distances of policies, seconds by part of the work, and speed.

Sums are added up over micro-batches and ranks; ratios are taken of these.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.hooks.convert import cache_and_speculation
from headrace.job.schema.run import TrackingSection
from headrace.job.schema.training import TrainSection
from headrace.rpc import tracing
from headrace.trajectory import Sample
from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.planning import ModelFlops

MISMATCH = (
    "mismatch/training_log_ppl",
    "mismatch/training_ppl",
    "mismatch/rollout_log_ppl",
    "mismatch/rollout_ppl",
    "mismatch/kl",
    "mismatch/k3_kl",
    "mismatch/log_ppl_diff",
    "mismatch/log_ppl_abs_diff",
    "mismatch/ppl_ratio",
    "mismatch/chi2_token",
    "mismatch/chi2_sequence",
)
"""Means over the responses that have a trained token."""

MAXIMA = ("ratio/max", "tis_weight/max")
"""The largest values over all tokens; none of them is ever negative."""

MEANS = {
    "entropy": "entropy",
    "ratio/mean": "ratio",
    "ppo_kl": "ppo_kl",
    "clip_fraction": "clip_fraction",
    "clip_fraction/low": "clipped_low",
    "clip_fraction/high": "clipped_high",
    "tis_weight/mean": "tis_weight",
    "tis_weight/truncated": "tis_truncated",
    "opsm/masked": "opsm_masked",
    "rs/rejected": "rs_rejected",
    "rs/vetoed": "rs_vetoed",
    "log_prob_diff/mean": "log_prob_diff",
    "sampling_mask/kept": "kept_tokens",
    "sampling_mask/outside": "outside_mask",
}
"""Means over the trained tokens, by the sum they come from."""

DEVIATIONS = {"ratio/std": ("ratio", "ratio_squared"), "tis_weight/std": ("tis_weight", "tis_weight_squared")}
"""Standard deviations over the trained tokens, likewise."""

SUMS = (
    *("loss/policy", "loss/sft", "loss/custom", "loss/kl", "loss/entropy"),
    "tokens",
    *MEANS.values(),
    "ratio_squared",
    "tis_weight_squared",
    "answers",
    *MISMATCH,
)
"""The squared statistics: of the distance from 1, near which the values are; plain squares would lose it."""


def reported(config: TrainSection, *, has_custom_tis: bool) -> frozenset[str]:
    """The names of a job's statistics. A user's function in the place of TIS reports what it likes, itself."""
    match config.loss_type:
        case "sft_loss":
            return frozenset({"entropy"})
        case "custom_loss":
            return frozenset({"entropy", "log_prob_diff/mean"})
    weighs = config.use_tis and not has_custom_tis
    absent = {"tis_weight": not weighs, "opsm": not config.use_opsm, "rs": not config.use_rs}
    absent["sampling_mask"] = not config.keep_sampling_mask
    names = {*MEANS, *DEVIATIONS, *MAXIMA, *MISMATCH}
    return frozenset(name for name in names if not absent.get(name.partition("/")[0], False))


def statistics(names: frozenset[str], sums: Mapping[str, float], largest: Mapping[str, float]) -> dict[str, float]:
    """The statistics called `names`, from the sums over all tokens and the largest values."""
    tokens = max(sums["tokens"], 1.0)
    found = {name: sums[source] / tokens for name, source in MEANS.items()}
    found |= {name: sums[name] / max(sums["answers"], 1.0) for name in MISMATCH}
    for name, (total, squared) in DEVIATIONS.items():
        distance = sums[total] / tokens - 1.0
        found[name] = max(sums[squared] / tokens - distance**2, 0.0) ** 0.5 if sums["tokens"] else 0.0
    return {name: value for name, value in (found | dict(largest)).items() if name in names}


_PEAK_TFLOPS: Mapping[str, float] = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "A40": 149.7,
    "A10": 125.0,
    "RTX 4090": 165.2,
}
"""Dense bfloat16, from NVIDIA's data sheets; the first name that is part of the device's counts."""


def peak_tflops(tracking: TrackingSection, device: torch.device) -> float | None:
    """The job's figure, else the GPU's; None for a CPU or a GPU that is not in the table."""
    if tracking.peak_tflops is not None or device.type != "cuda":
        return tracking.peak_tflops
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> float | None:
    """The peak of the GPU that the driver calls by this name; None for one that is not in the table."""
    return next((peak for name, peak in _PEAK_TFLOPS.items() if name in device_name), None)


@dataclass(frozen=True, slots=True)
class Speed:
    """Operations are the model's own: each sample counts as a sequence of its own, trained once."""

    flops: ModelFlops
    world_size: int
    peak: float | None

    def metrics(self, samples: Sequence[SampleFacts], seconds: Mapping[str, float]) -> dict[str, float]:
        """Metrics from this rank's seconds by part: fetch, log_probs, forward, forward_backward, optimizer, critic."""
        seconds = defaultdict(float, seconds)
        steps = seconds["forward_backward"] + seconds["optimizer"]
        lengths = [(s.prompt_length + s.response_length, s.response_length) for s in samples]
        tflops = self.flops.training(lengths) / max(steps, 1e-9) / self.world_size / 1e12
        tokens_per_second = sum(tokens for tokens, _ in lengths) / max(seconds["log_probs"] + steps, 1e-9)
        found = {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_rank": tokens_per_second / self.world_size,
            "tflops_per_rank": tflops,
            "time/fetch_seconds": seconds["fetch"],
            "time/log_probs_seconds": seconds["log_probs"],
            "time/forward_seconds": seconds["forward"],
            "time/backward_seconds": seconds["forward_backward"] - seconds["forward"],
            "time/optimizer_seconds": seconds["optimizer"],
        }
        if "critic" in seconds:
            found["time/critic_seconds"] = seconds["critic"]
        return found if self.peak is None else found | {"mfu": tflops / self.peak}


class Stopwatch:
    """Parts may come many times; `read` adds them up. On a GPU its own events are read, so nothing waits meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times the block, and on a GPU the work that it gives to the GPU."""
        if self._on_gpu:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            with tracing.span(f"headrace.{name}"):
                yield
            last.record()
            self._events.append((name, first, last))
        else:
            with self.host_part(name):
                yield

    @contextmanager
    def host_part(self, name: str) -> Iterator[None]:
        """Times the block by the CPU's clock, on any device."""
        started = time.perf_counter()
        with tracing.span(f"headrace.{name}"):
            yield
        self._seconds[name] += time.perf_counter() - started

    def read(self) -> dict[str, float]:
        """Seconds by part since the last read. Waits for the GPU."""
        if self._events:
            torch.cuda.synchronize()
        for name, first, last in self._events:
            self._seconds[name] += first.elapsed_time(last) / 1000
        found = dict(self._seconds)
        self._events.clear()
        self._seconds.clear()
        return found


LARGEST_STALENESS = 8
"""Everything older is counted as so old."""


class LogProbDistance:
    """Adds up over the micro-batches of a rollout step; `read` is collective."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, LARGEST_STALENESS + 1, dtype=torch.float64, device=device)
        self._largest = torch.zeros(LARGEST_STALENESS + 1, dtype=torch.float64, device=device)

    def add(self, before: Tensor, rollout: Tensor, mask: Tensor, staleness: Tensor) -> None:
        """Adds log-probs of trainer and engine [B, S] where `mask` [B, S] is 1, with each sample's staleness [B, 1]."""
        distance = ((before - rollout).abs() * mask).double()
        steps_behind = staleness[:, 0].long().clamp(0, LARGEST_STALENESS)
        self._sums[0].index_add_(0, steps_behind, distance.sum(1))
        self._sums[1].index_add_(0, steps_behind, mask.sum(1).double())
        self._largest.scatter_reduce_(0, steps_behind, distance.amax(1), "amax")

    def read(self) -> dict[str, float]:
        """Returns mean and maximum for each staleness that occurred, over all ranks, since the last read."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        found = {}
        rows = zip(*self._sums.tolist(), self._largest.tolist(), strict=True)
        for steps_behind, (total, tokens, largest) in enumerate(rows):
            if tokens:
                found[f"log_prob_diff/lag_{steps_behind}/mean"] = total / tokens
                found[f"log_prob_diff/lag_{steps_behind}/max"] = largest
        self._sums.zero_()
        self._largest.zero_()
        return found


class TeacherDistance:
    """Adds up over the micro-batches of a rollout step; `read` is collective."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> None:
        """All [B, S]; tokens whose mask is 0 do not count."""
        gaps = torch.where(mask > 0, log_probs - teacher_log_probs, 0.0)
        self._sums += torch.stack((gaps.double().sum(), (mask > 0).double().sum()))

    def read(self) -> dict[str, float]:
        """The mean of log π − log π_teacher, an estimate of the reverse KL, over all ranks since the last read."""
        dist.all_reduce(self._sums)
        total, tokens = self._sums.tolist()
        self._sums.zero_()
        return {"opd/kl": total / max(tokens, 1.0)}


def accepted_drafts(samples: Iterable[Sample], device: torch.device) -> dict[str, float]:
    """Collective: how speculative decoding did over the samples of all ranks; {} where no engine has verified drafts.

    Ranks that have the same samples weigh alike, so ratios of sums over all ranks are the batch's.
    """
    counts = [cache_and_speculation(sample)[0] for sample in samples]
    rows = [(c.completion_token_num, c.spec_verify_ct, c.spec_accept_token_num, c.spec_draft_token_num) for c in counts]
    sums = torch.tensor([(0, 0, 0, 0), *rows], dtype=torch.float64, device=device).sum(0)
    dist.all_reduce(sums)
    tokens, verifications, accepted, drafts = sums.tolist()
    if not verifications:
        return {}
    return {"spec_accept_length": tokens / verifications, "spec_accept_rate": accepted / max(drafts, 1.0)}
