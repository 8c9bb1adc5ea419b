"""A rank's start on a CPU: what it loads, and the random numbers of its hooks."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

_RANK = """
import random, sys
import numpy, torch
from headrace.job.schema.job import Job
import services.trainer.__main__
from services.trainer.model.build import join_ranks

unused = ["torch._inductor", "torch._dynamo", "torch.utils.cpp_extension", "setuptools", "wandb"]
assert torch.cuda.is_available() or not [name for name in unused if name in sys.modules]
join_ranks(Job.model_validate_json(open(sys.argv[1]).read()))
assert torch.compile.__module__ == "torch"  # a hook may load it
print(random.random(), numpy.random.random(), torch.rand(1).item())
"""


def test_seed_makes_what_hooks_draw_the_same_and_a_rank_on_a_cpu_loads_no_compiler(load_with, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(load_with("--seed", "7").model_dump_json())
    command = [sys.executable, "-c", _RANK, str(tmp_path / "job.json")]
    drawn = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split()
    generator = torch.Generator().manual_seed(7)
    expected = [random.Random(7).random(), np.random.RandomState(7).random(), torch.rand(1, generator=generator).item()]
    assert [float(number) for number in drawn] == expected
