"""What an engine's start on a CPU leaves out, and does once, with SGLang itself in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.cpu.served import served_models
from tests.long_forms import whole_run
from tests.support.models.tiny_model import make_tiny_qwen3

_STARTS = """
import json, sys
from pathlib import Path
from services.rollout.engine import launch

checkpoint = sys.argv[1]
assert not launch._machine(Path(checkpoint)).has_accelerator
from sglang.srt.plugins import load_plugins
launch.fork_processes()
load_plugins()

from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.managers import detokenizer_manager, scheduler, tp_worker
from sglang.srt.debug_utils.dumper import _MegatronPlugin
from sglang.srt.models.registry import ModelRegistry

users = [user.get_tokenizer(checkpoint, tokenizer_mode="auto") for user in (scheduler, tp_worker, detokenizer_manager)]
other = scheduler.get_tokenizer(checkpoint, tokenizer_mode="slow")
before = sorted(ModelRegistry.models)
print(json.dumps({
    "tokenizers": len({id(each) for each in users}),
    "with other arguments": other is not users[0],
    "megatron": _MegatronPlugin._available,
    "models": before,
    "shared file": shm_path_for("instance"),
    "found when it is asked for": ModelRegistry.is_arch_supported("LlamaForCausalLM"),
}))
"""


@whole_run
@pytest.mark.engine
def test_one_tokenizer_and_one_model_and_no_megatron(tmp_path: Path) -> None:
    checkpoint = make_tiny_qwen3(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", _STARTS, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found.pop("shared file")).parent == tmp_path, "it goes with the engine's own folder"
    assert found == {
        "tokenizers": 1,
        "with other arguments": True,
        "megatron": False,
        "models": ["Qwen3ForCausalLM"],
        "found when it is asked for": True,
    }


@pytest.mark.parametrize("config", [None, {}, {"architectures": None}, {"architectures": ["NobodyForCausalLM"]}])
def test_an_architecture_that_is_not_found_is_left_to_sglang(tmp_path: Path, config: dict[str, Any] | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert served_models(tmp_path) == []
