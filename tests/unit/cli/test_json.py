"""`--json`: one JSON value on stdout, and nothing else there."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.api.sample.v1 import sample_pb2
from headrace.cli.arg_types import print_json
from headrace.cli.main import main
from headrace.models.registry import PRESETS
from headrace.rpc.access import Role, add_token
from headrace.run_folder import MetricsRow, RunFolder, ServiceEntry

SERVICES = [f"--{name}-address=127.0.0.1:70{at}" for at, name in enumerate(("buffer", "reward", "rollout"), 10)]


class Engines(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers each response in two parts."""

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: object) -> AsyncIterator[Any]:
        assert request.run == "run", "the command names its run: several may share the service"
        for index in range(request.n):
            yield rollout_pb2.GenerateResponse(text="4 + ", index=index)
            yield rollout_pb2.GenerateResponse(
                text=str(index),
                index=index,
                status=sample_pb2.SAMPLE_STATUS_COMPLETED,
                policy_ranges=[sample_pb2.PolicyRange(policy_version=2**40, end=3)],
            )

    async def Evaluate(self, request: rollout_pb2.EvaluateRequest, context: object) -> AsyncIterator[Any]:
        assert request.run == "run", "the command names its run: several may share the service"
        result = rollout_pb2.EvalResult(
            name="sums", mean_reward=0.5, pass_at_k=[rollout_pb2.PassAtK(k=1, estimate=0.5)]
        )
        yield rollout_pb2.EvaluateResponse(done=1, total=1, results=[result])

    async def GetFleet(self, request: object, context: object) -> rollout_pb2.GetFleetResponse:
        return rollout_pb2.GetFleetResponse(
            engines=[rollout_pb2.Engine(engine_id="engine-0", state=rollout_pb2.ENGINE_STATE_READY)]
        )


@asynccontextmanager
async def a_live_run(folder: RunFolder, load_with: Any) -> AsyncIterator[None]:
    server = grpc.aio.server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Engines(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    folder.create(load_with("--run-dir", str(folder.path.parent), "--run-name", folder.path.name))
    folder.write_services({"rollout": ServiceEntry(address, None, os.getpid())})
    try:
        yield
    finally:
        await server.stop(0.0)


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_message_has_all_its_fields_and_numbers_of_64_bits_stay_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(rollout_pb2.EvalResult(name="é", max_policy_version=2**40, pass_at_k=[rollout_pb2.PassAtK(k=2)]))
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["max_policy_version"], found["low"]) == ("é", 2**40, None)
    assert found["pass_at_k"] == [{"k": 2, "estimate": 0.0, "low": None, "high": None}]
    print_json(rollout_pb2.Engine(state=rollout_pb2.ENGINE_STATE_READY))
    assert json.loads(capsys.readouterr().out)["state"] == "ENGINE_STATE_READY"


def test_models_are_listed_with_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "models")
    assert [each["name"] for each in found] == list(PRESETS)
    assert all(each["parameters"] > 1e6 and each["layers"] > 0 for each in found)


def test_tokens_are_listed_without_their_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.json"
    add_token(file, "carol", Role.ADMIN)
    (found,) = printed(capsys, "tokens", "list", str(file))
    assert (found["name"], found["role"], set(found)) == ("carol", "admin", {"name", "role", "added"})


def test_a_check_gives_its_plan_and_its_lists(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "check", str(job_file), *SERVICES)
    assert "4 prompts x 8 samples" in found["plan"]["batch"]
    assert (found["refused"], found["failed"], found["elsewhere"]) == ([], [], None)


def test_a_check_of_a_hook_names_what_was_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("def reward(args, sample, **kwargs):\n    return 1.0\n")
    (found,) = printed(capsys, "check", "hook", f"{tmp_path / 'reward.py'}:reward")
    assert found["kind"] == "reward"
    assert found["passed"]
    assert found["failed"] == []


async def test_a_live_run_is_asked_in_json(load_with, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    async with a_live_run(folder, load_with):
        answers = await asyncio.to_thread(printed, capsys, "generate", "2 + 2 =", str(folder.path), "-n", "2")
        data = ("--data", "sums", str(tmp_path / "sums.jsonl"))
        (result,) = await asyncio.to_thread(printed, capsys, "eval", str(folder.path), *data)
        status = await asyncio.to_thread(printed, capsys, "status", str(folder.path), code=1)
    assert [(each["text"], each["status"]) for each in answers] == [
        ("4 + 0", "SAMPLE_STATUS_COMPLETED"),
        ("4 + 1", "SAMPLE_STATUS_COMPLETED"),
    ]
    assert answers[0]["policy_ranges"] == [{"policy_version": 2**40, "start": 0, "end": 3, "masked": False}]
    assert (result["name"], result["mean_reward"]) == ("sums", 0.5)
    assert status["state"] == "running"
    assert status["services"]["rollout"]["status"]["engines"][0]["engine_id"] == "engine-0"


def test_a_run_that_has_ended_says_where(load_with, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path / "runs" / "run")
    run.create(load_with("--run-dir", str(run.path.parent), "--num-rollout", "3"))
    run.write_services({"trainer": ServiceEntry("127.0.0.1:1", None, 2**22 + 1)})
    run.metrics.write_text(json.dumps(MetricsRow(2, 0.0, {"eval_error": 0.0, "eval/sums": 0.5}).fields()) + "\n")
    (run.path / "checkpoints" / "step-00000002").mkdir(parents=True)
    found = printed(capsys, "status", str(run.path), code=1)
    assert (found["state"], found["saved_step"], found["num_steps"]) == ("interrupted", 2, 3)
    assert [(each["step"], each["scored_by"]) for each in found["checkpoints"]] == [(2, {})]
    (row,) = printed(capsys, "eval", str(run.path), "--history")
    assert (row["step"], row["eval/sums"]) == (2, 0.5)
