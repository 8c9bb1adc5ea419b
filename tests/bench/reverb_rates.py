"""DeepMind Reverb on the same samples, in its own environment.

`reverb_rates.py SIZE SAMPLES PER_CALL IN_FLIGHT ROUNDS`
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import numpy as np
import reverb
from cpu import cpu_seconds  # beside this file: it is run as a program


def main(size: int, num_samples: int, per_call: int, in_flight: int, rounds: int) -> None:
    server = subprocess.Popen([sys.executable, __file__, "serve", str(num_samples)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        client = reverb.Client(f"localhost:{int(server.stdout.readline())}")
        data = [np.random.randint(0, 256, size, dtype=np.uint8) for _ in range(per_call)]
        puts, fetches, cpu = [], [], []
        for _ in range(rounds):
            before = cpu_seconds(server.pid)
            puts.append(num_samples / put(client, data, num_samples, in_flight))
            cpu.append((cpu_seconds(server.pid) - before) / num_samples)
            fetches.append(num_samples / fetch(client, num_samples, per_call))
        rates = {"put": puts, "fetch": fetches, "put_cpu": cpu}
        print(json.dumps({name: statistics.median(values) for name, values in rates.items()}))
    finally:
        server.kill()


def put(client: reverb.Client, data: list[np.ndarray], num_samples: int, in_flight: int) -> float:
    started = time.perf_counter()
    with client.trajectory_writer(num_keep_alive_refs=len(data)) as writer:
        for first in range(0, num_samples, len(data)):
            for array in data:
                writer.append([array])
                writer.create_item("table", 1.0, [writer.history[0][-1:]])
            writer.flush(block_until_num_items=in_flight * len(data) if first + len(data) < num_samples else 0)
    return time.perf_counter() - started


def fetch(client: reverb.Client, num_samples: int, per_call: int) -> float:
    started = time.perf_counter()
    for _ in range(num_samples // per_call):
        assert sum(1 for _ in client.sample("table", num_samples=per_call)) == per_call
    return time.perf_counter() - started


def serve(max_size: int) -> None:
    table = reverb.Table(
        "table", reverb.selectors.Uniform(), reverb.selectors.Fifo(), max_size, reverb.rate_limiters.MinSize(1)
    )
    server = reverb.Server([table])
    print(server.port, flush=True)
    server.wait()


if __name__ == "__main__":
    serve(int(sys.argv[2])) if sys.argv[1] == "serve" else main(*map(int, sys.argv[1:6]))
