"""`make bench`: log-probs and entropy of hidden states, fused and in chunks against log_softmax of all logits.

CPU time of forward and backward, and the highest memory above what the inputs take, each in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import Queue

import torch
from torch import Tensor

from services.trainer.rl.algorithms.vocab_parallel import log_probs_and_entropy

POSITIONS, WIDTH, VOCABULARY = 4096, 576, 49152
ROUNDS = 3

Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """As it is usually written."""
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return log_probs_and_entropy(hidden, weight, target, 1.0, None)


def run(function: Function, positions: int, answer: Queue[tuple[float, float]]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(positions, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH).mul_(0.05).requires_grad_()
    target = torch.randint(0, VOCABULARY, (positions,))
    before = highest_mebibytes()
    seconds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        log_probs, entropy = function(hidden, weight, target)
        (log_probs.mean() + 0.01 * entropy.mean()).backward()
        seconds.append(time.process_time() - started)
    answer.put((statistics.median(seconds), highest_mebibytes() - before))


def highest_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    print(f"log-probs and entropy, width {WIDTH}, vocabulary {VOCABULARY}, forward and backward, median of {ROUNDS}")
    for positions in (POSITIONS // 8, POSITIONS):
        figures = {}
        for function in (plain, fused):
            answer: Queue[tuple[float, float]] = spawn.Queue()
            process = spawn.Process(target=run, args=(function, positions, answer))
            process.start()
            figures[function.__name__] = answer.get(timeout=600)
            process.join(30)
        base_seconds, base_memory = figures["plain"]
        for name, (seconds, memory) in figures.items():
            print(
                f"  {positions:5} positions, {name:6} {seconds:7.2f} s   {seconds / base_seconds:.2f}×"
                f"   {memory:7.0f} MiB   {memory / base_memory:.2f}×"
            )


if __name__ == "__main__":
    main()
