"""How an engine is started: its arguments and environment, what SGLang leaves out on a CPU, what stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import ConfigError, Unavailable
from headrace.job.engine_shape import EngineShape
from headrace.job.schema.job import Job
from headrace.job.schema.placement import PlacementSection
from headrace.job.schema.services import BufferSection
from headrace.process.scratch import Scratch
from services.rollout.engine import arguments, launch
from services.rollout.engine.arguments import EngineOptions, Machine, NodeOptions
from services.rollout.engine.cpu.served import add_gated
from services.rollout.engine.process import EngineProcess, NodesProcess, SglangProcess, nodes_here
from services.rollout.fleet_build import engine_options, sglang_factory, slot_options
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


FLAGS = {
    name: (
        f"--{name.replace('_', '-')}",
        not name.startswith("disable")
        and name not in ("sleep_on_idle", "skip_server_warmup", "enable_priority_scheduling", "enable_memory_saver"),
    )
    for name in (
        *("device", "attention_backend", "sampling_backend", "disable_overlap_schedule", "skip_server_warmup"),
        *("sleep_on_idle", "max_total_tokens", "max_running_requests", "dtype", "model_path", "tp_size", "host"),
        *("port", "weight_version", "random_seed", "base_gpu_id", "mem_fraction_static", "enable_metrics"),
        *("enable_priority_scheduling", "default_priority_value", "load_snapshot_publish_interval"),
        *("enable_memory_saver", "nnodes", "node_rank", "dist_init_addr", "pp_size", "dp_size"),
    )
}
_OF_NODES = ("--nnodes", "--node-rank", "--dist-init-addr", "--tp-size", "--pp-size", "--dp-size", "--base-gpu-id")
CPU = Machine(has_accelerator=False, flags=FLAGS)
GPU = Machine(has_accelerator=True, flags=FLAGS)


def job(**sglang: object) -> Job:
    return Job.model_validate({"model": {"hf_checkpoint": Path("/m")}, "sglang": sglang})


def test_an_unknown_argument_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"-statik is no argument .* did you mean --sglang-mem-fraction-static"):
        arguments.check({"mem_fraction_statik": 0.5}, CPU)


def test_rollout_num_gpus_per_engine_is_the_tensor_parallel_size_of_an_engine() -> None:
    placement = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}
    told = Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": placement})
    words = arguments.words(engine_options(told), CPU, engine=0, port=5)
    assert words[words.index("--tp-size") + 1] == "2"


def test_each_machine_of_an_engine_is_told_which_it_is_and_which_gpus_it_has() -> None:
    placement = {"rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 8, "num_gpus_per_node": 4}
    sglang = {"pp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    told = Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": placement, "sglang": sglang})
    flags = FLAGS | {"enable_dp_attention": ("--enable-dp-attention", False)}
    options = slot_options(told)(1)
    for rank, first_gpu in ((0, "8"), (1, "12")):
        node = NodeOptions(rank, "10.0.0.7:5000")
        words = arguments.words(replace(options, first_gpu=4 * rank), Machine(True, flags), engine=1, port=5, node=node)
        assert {flag: words[words.index(flag) + 1] for flag in words if flag in _OF_NODES} == {
            "--nnodes": "2",
            "--node-rank": str(rank),
            "--dist-init-addr": "10.0.0.7:5000",
            "--tp-size": "4",
            "--pp-size": "2",
            "--dp-size": "2",
            "--base-gpu-id": first_gpu,
        }
        assert "--enable-dp-attention" in words


def test_on_a_cpu_each_rank_of_an_engine_may_use_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would give each a memory node of its own, and refuse to start."""
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    placement = {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4}
    told = Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": placement, "sglang": {"nnodes": 2}})
    assert arguments.environment(engine_options(told), has_accelerator=False)["SGLANG_CPU_OMP_THREADS_BIND"] == (
        "0,1|0,1"
    )


def test_without_an_accelerator_the_cpu_recipe_is_chosen_and_the_job_may_change_it() -> None:
    words = arguments.words(
        engine_options(job(max_total_tokens=1024, disable_overlap_schedule=False)), CPU, engine=1, port=5
    )
    assert words[words.index("--device") + 1] == "cpu"
    assert words[words.index("--max-total-tokens") + 1] == "1024"
    assert words[words.index("--random-seed") + 1] == "43"
    assert "--sleep-on-idle" in words
    assert "--disable-overlap-schedule" not in words


def test_with_an_accelerator_engines_are_laid_out_over_it() -> None:
    words = arguments.words(engine_options(job()), GPU, engine=3, port=5)
    assert "--device" not in words
    assert words[words.index("--base-gpu-id") + 1] == "3"
    assert "OMP_NUM_THREADS" not in arguments.environment(engine_options(job()), has_accelerator=True)


@pytest.mark.parametrize(("megatron", "dtype"), [({}, "float32"), ({"bf16": True}, "bfloat16")])
def test_an_engine_serves_the_dtype_that_is_published(tmp_path: Path, megatron: dict[str, object], dtype: str) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float16", "torch_dtype": "float16"}')
    told = Job.model_validate({"model": {"hf_checkpoint": tmp_path}, "megatron": megatron})
    words = arguments.words(engine_options(told), GPU, engine=0, port=5)
    assert words[words.index("--dtype") + 1] == dtype


def test_with_offload_rollout_engines_on_gpus_can_give_up_their_memory() -> None:
    placement = {"colocate": True, "offload_rollout": True}
    told = engine_options(Job.model_validate({"model": {"hf_checkpoint": "m"}, "placement": placement}))
    assert "--enable-memory-saver" in arguments.words(told, GPU, engine=0, port=5)
    assert "--enable-memory-saver" not in arguments.words(told, CPU, engine=0, port=5), "SGLang has none there"
    assert "--enable-memory-saver" not in arguments.words(engine_options(job()), GPU, engine=0, port=5)


@pytest.mark.parametrize(("engines", "max_staleness", "threads"), [(2, 0, "4"), (12, 1, "1")])
def test_engines_share_the_cores_and_leave_half_to_a_trainer_that_works_meanwhile(
    monkeypatch: pytest.MonkeyPatch, engines: int, max_staleness: int, threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    shared = job().model_copy(
        update={
            "placement": PlacementSection(rollout_num_gpus=engines),
            "buffer": BufferSection(max_staleness=max_staleness),
        }
    )
    assert arguments.environment(engine_options(shared), has_accelerator=False)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("sglang", "of_others", "of_evaluations"),
    [
        ({"enable_priority_scheduling": True, "default_priority_value": 5}, "5", 4),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, "0", 1),
    ],
)
def test_engines_that_schedule_by_priority_take_evaluations_last(
    sglang: dict[str, object], of_others: str, of_evaluations: int
) -> None:
    flags = {**FLAGS, "schedule_low_priority_values_first": ("--schedule-low-priority-values-first", False)}
    words = arguments.words(engine_options(job(**sglang)), Machine(False, flags), engine=0, port=5)
    assert words[words.index("--default-priority-value") + 1] == of_others
    assert arguments.evaluation_priority(sglang) == of_evaluations


ENGINE = """
import json, os, sys, tempfile, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

if file := os.environ.get("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"):
    Path(file.removeprefix("file://")).write_text("ranks meet here")
tempfile.NamedTemporaryFile(delete=False)  # as SGLang does for its sockets
if sys.argv[2] == "fails":
    sys.exit(3)
if sys.argv[2] == "hangs":
    time.sleep(600)
if sys.argv[2] == "refused":
    print("engine: --sglang-statik is no argument of SGLang's", file=sys.stderr)
    sys.exit(78)

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"weight_version": "default", "model_path": "m"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if sys.argv[2] == "ends":
            os._exit(0)

HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


class Engines:
    """Engines that do as they are told, and the folder for what is temporary."""

    def __init__(self, folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self.temporary = temporary
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))

    def __call__(self, *behaviours: str) -> EngineProcess:
        """An engine that does so on each of its machines."""

        def command(options: EngineOptions, *, engine: int, port: int, node: NodeOptions | None) -> list[str]:
            return [sys.executable, "-c", ENGINE, str(port), behaviours[node.rank if node else 0]]

        self._monkeypatch.setattr(launch, "command", command)
        shape = EngineShape(len(behaviours), nodes=len(behaviours))
        options = EngineOptions(self._folder, shape, 0, {}, threads=1)
        return nodes_here(options, 0, self._folder, has_accelerator=False)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A path that is short enough for sockets, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def engines(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(tmp_path, temporary, monkeypatch)


async def test_nothing_is_left_of_an_engine_that_does_not_start(engines: Engines) -> None:
    with pytest.raises(Unavailable, match="exit code 3"):
        await engines("fails").start(seconds=50.0)
    assert not list(engines.temporary.iterdir())


async def test_an_argument_that_the_launcher_refuses_is_a_mistake_in_the_job(engines: Engines) -> None:
    with pytest.raises(ConfigError, match=r"^--sglang-statik is no argument of SGLang's$"):
        await engines("refused").start(seconds=50.0)
    assert not list(engines.temporary.iterdir())


async def test_nothing_is_left_of_an_engine_that_is_stopped(engines: Engines) -> None:
    engine = engines("serves")
    await engine.start(seconds=50.0)
    assert list(engines.temporary.iterdir())
    await engine.stop()
    assert not list(engines.temporary.iterdir())


async def test_an_engine_of_several_machines_is_at_the_address_of_the_first_and_ends_with_any(engines: Engines) -> None:
    engine = engines("serves", "serves")
    assert isinstance(engine, NodesProcess)
    first, other = engine.nodes
    assert isinstance(other, SglangProcess)
    await engine.start(seconds=50.0)
    assert engine.url == first.url != other.url
    assert engine.exit_code is None
    assert (engine.memory_bytes() or 0) > (first.memory_bytes() or 0)
    os.killpg(other.pid, signal.SIGKILL)
    assert await engine.wait() == 128 + signal.SIGKILL
    assert first.exit_code is not None
    assert "on machine 1" in engine.last_lines()
    assert not list(engines.temporary.iterdir())


async def test_an_engine_does_not_start_when_one_of_its_machines_does_not(engines: Engines) -> None:
    engine = engines("hangs", "fails")
    with pytest.raises(Unavailable, match="process on machine 1 ended with exit code 3"):
        await engine.start(seconds=50.0)
    assert engine.exit_code is not None
    assert not list(engines.temporary.iterdir())


def test_the_service_deletes_leftovers_before_its_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = Scratch(tmp_path, "engine-3")
    left.make()
    job: dict[str, Any] = {"model": {"hf_checkpoint": tmp_path}}
    sglang_factory(Job.model_validate(job), tmp_path, has_accelerator=False)
    assert not left.folder.exists()


def test_the_shared_experts_output_is_added_behind_its_gate() -> None:
    torch.manual_seed(1)
    hidden, gate, shared, final = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8), torch.randn(3, 8)
    expected = torch.stack(
        [final[row] + shared[row] / (1 + torch.exp(-(hidden[row] * gate).sum())) for row in range(3)]
    )
    add_gated(hidden, gate, shared, final)
    torch.testing.assert_close(final, expected)
