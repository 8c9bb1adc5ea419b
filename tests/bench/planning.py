"""`python -m tests.bench.planning`: a batch of 4,096 samples is planned; micro-batches and work beside slime's rule.

CPU seconds of the first plan of this process for each line, and the most of five. The collector's objects are frozen
before, as the trainer does at its start: a full collection over the libraries takes 0.1 s wherever it falls.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from itertools import product

from services.trainer.plan.batch import SampleFacts
from services.trainer.plan.planning import Planner
from services.trainer.plan.rows import Packing
from tests.support.slime_micro_batches import slime_cut

NUM_SAMPLES, PROMPT_TOKENS, CAPACITY, RANKS = 4096, 64, 8192, (1, 8)
PACKINGS: tuple[Packing, ...] = ("packed", "shared_prompts", "padded")


def main() -> None:
    """Prints one line for each distribution, packing and number of ranks."""
    gc.freeze()
    print(f"{'lengths':<12}{'packing':<16}{'ranks':>5}{'first s':>9}{'most s':>8}{'micro':>7}{'slime':>7}{'work':>9}")
    for longest, (name, draw), packing, ranks in product((CAPACITY, 30_000), draws().items(), PACKINGS, RANKS):
        lengths = [min(max(PROMPT_TOKENS + 1, int(draw())), longest) for _ in range(NUM_SAMPLES - 1)] + [longest]
        samples = [facts(i, length) for i, length in enumerate(lengths)]
        planner = Planner(ranks, packing, 1, CAPACITY, tokens)
        seconds = []
        for _ in range(5):
            started = time.process_time()
            (plan,) = planner.plan(samples, 1)
            seconds.append(time.process_time() - started)
        loads = [sum(lengths[int(i)] for i in plan.sample_ids(rank)) for rank in range(ranks)]
        ideal = max(sum(lengths) / ranks, max(lengths))
        label = name if longest == CAPACITY else f"{name}*"
        print(
            f"{label:<12}{packing:<16}{ranks:>5}{seconds[0]:>9.3f}{max(seconds):>8.3f}{len(plan.micro_batches(0)):>7}"
            f"{slime_cut(lengths, ranks, CAPACITY).micro_batches:>7}{max(loads) / ideal:>9.4f}"
        )
    print("* samples of up to 30,000 tokens, beyond the 8,192 of a micro-batch. work: the busiest rank's; 1 is equal")


def draws() -> dict[str, Callable[[], float]]:
    """Lengths in tokens."""
    numbers = random.Random(0)
    return {
        "uniform": lambda: numbers.uniform(100, 4000),
        "lognormal": lambda: numbers.lognormvariate(6.5, 0.8),
        "pareto": lambda: 300 * numbers.paretovariate(1.5),
        "bimodal": lambda: numbers.gauss(*numbers.choice([(300, 40), (3500, 300)])),
        "one giant": lambda: numbers.uniform(100, 1000),
    }


def facts(number: int, length: int) -> SampleFacts:
    """One of eight samples of a prompt."""
    return SampleFacts(
        sample_id=str(number),
        group_id=str(number // 8),
        rollout_id=str(number),
        reward=1.0,
        status="completed",
        prompt_length=PROMPT_TOKENS,
        response_length=length - PROMPT_TOKENS,
        trained_tokens=length - PROMPT_TOKENS,
        min_policy_version=0,
    )


def tokens(sample: SampleFacts) -> int:
    """What ranks are balanced by."""
    return sample.prompt_length + sample.response_length


if __name__ == "__main__":
    main()
