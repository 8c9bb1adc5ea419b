"""What a rank's start loads, and what of it a hook may still load for itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.processes.training_run import ROOT

LOADED = """
import sys
import services.trainer.__main__
import services.trainer.model.build

unused = ["torch._inductor", "torch._dynamo", "torch.utils.cpp_extension", "setuptools", "wandb"]
assert not [name for name in unused if name in sys.modules]

import torch
import wandb
from torch.utils import cpp_extension

assert torch.compile.__module__ == "torch"
assert wandb.init
assert cpp_extension.load_inline is torch.utils.cpp_extension.load_inline
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron compiles on a GPU")
def test_a_rank_on_a_cpu_loads_no_compiler_and_its_hooks_may() -> None:
    subprocess.run([sys.executable, "-c", LOADED], check=True, timeout=300, cwd=ROOT)
