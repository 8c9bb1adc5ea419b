"""Every option that the rollout service reads is in the parts that are built of a job, with the job's value."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headrace.job.schema.job import Job
from headrace.job.schema.placement import EngineGroup
from services.rollout import __main__ as program
from services.rollout.admission import Kind
from services.rollout.agents.sampler import AgentSampler
from services.rollout.build import rollout_service
from services.rollout.evaluation import by_url
from services.rollout.evaluation.runner import SAMPLES_AT_ONCE, EvalRunner, Progress
from services.rollout.fleet_build import sglang_factory
from services.rollout.production.generator import GRACE_SECONDS
from services.rollout.production.hooks import AllSamples, CustomGenerateSampler, OwnFunctions, WithPreScoreHooks
from services.rollout.production.sampling import EngineSampler
from services.rollout.rollout_function import StepSampler
from services.rollout.service import RolloutService
from tests.support.job_options import Readers, ignored, options_named_in, options_read, same
from tests.support.models.tiny_vision import make_tiny_vision

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Built:
    """What a job makes: the service, and an engine as its fleet would start it."""

    job: Job
    service: RolloutService
    engines: Sequence[Any]

    @property
    def parts(self) -> Any:
        return self.service.parts

    @property
    def groups(self) -> Any:
        return self.parts.producer._sampler

    @property
    def router(self) -> Any:
        return self.service._router

    @property
    def engine_options(self) -> dict[str, Any]:
        return engine_options(self.engines[0])

    @property
    def services(self) -> float:
        """The number of rollout services that divide a step: each engine of theirs has four parts of it."""
        rollout, engines = self.job.rollout, len(self.parts.fleet.engines)
        samples = (rollout.rollout_batch_size or 0) * (rollout.n_samples_per_prompt or 0)
        return samples / (4 * engines * self.sampler(EngineSampler)._samples_together)

    def group(self, number: int) -> EngineGroup:
        """The group of an engine, as the fleet and the engine's process have it."""
        engine, told = self.parts.fleet.engines[number], engine_options(self.engines[number])
        return EngineGroup(
            name=engine.group,
            num_engines=sum(other.group == engine.group for other in self.parts.fleet.engines),
            num_gpus_per_engine=engine.shape.devices,
            overrides={name: value for name, value in told["sglang"].items() if name not in self.job.sglang},
        )

    def router_word(self, flag: str) -> str:
        words = self.router._command
        return str(words[words.index(flag) + 1])

    def watched(self, name: str) -> list[object]:
        """A timing as all parts have it that use it."""
        fleet = self.parts.fleet
        return [getattr(timing, name) for timing in (fleet._timing, fleet._watch_over._timing, self.router._timing)]

    def started(self, kind: type) -> Any:
        """The part of the kind that has processes of its own."""
        return next(part for part in self.service._custom if isinstance(part, kind))

    def sampler(self, kind: type) -> Any:
        """The sampler of the kind, behind those that change what it makes."""
        sampler: Any = self.parts.sampler
        while not isinstance(sampler, kind):
            sampler = sampler._sampler
        return sampler


def engine_options(engine: Any) -> dict[str, Any]:
    """What an engine's process is told."""
    found: dict[str, Any] = json.loads(engine._child._command[-1])
    return found


ENGINES: Readers = {
    "hf_checkpoint": [lambda b: b.parts.encoder._hf_checkpoint, lambda b: Path(b.engine_options["hf_checkpoint"])],
    "trust_remote_code": [lambda b: b.parts.encoder._trust_remote_code],
    "prompt_data": [lambda b: tuple(f"{folder}/prompts.jsonl" for folder in b.parts.encoder._images._folders[:1])],
    "prompt_root": [lambda b: b.parts.evaluator._files.root, lambda b: b.parts.encoder._images._folders[-1]],
    "data_source_path": [lambda b: b.sampler(OwnFunctions)._any_path and b.job.data.data_source_path],
    "apply_chat_template": [lambda b: b.parts.encoder._apply_chat_template],
    "apply_chat_template_kwargs": [lambda b: b.parts.encoder.variables],
    "rollout_seed": [
        lambda b: b.groups._rollout_seed,
        lambda b: b.parts.evaluator._seed,
        lambda b: b.engine_options["seed"],
    ],
    **{
        option: [
            lambda b, name=name: getattr(b.parts.params, name),
            lambda b, name=name: getattr(b.groups._params, name),
            lambda b, name=name: getattr(b.parts.evaluator._defaults, name),
        ]
        for option, name in {
            "rollout_temperature": "temperature",
            "rollout_top_p": "top_p",
            "rollout_top_k": "top_k",
            "rollout_max_response_len": "max_new_tokens",
            "rollout_stop": "stop",
            "rollout_stop_token_ids": "stop_token_ids",
        }.items()
    },
    "rollout_max_prompt_len": [lambda b: b.groups._max_prompt_tokens],
    "rollout_max_context_len": [lambda b: b.groups._context.tokens],
    "rollout_batch_size": [lambda b: b.groups._all_samples._groups_per_step],
    "n_samples_per_prompt": [lambda b: b.parts.slots.shares.slots(Kind.TRAINING) / b.job.rollout.max_groups_in_flight],
    "max_groups_in_flight": [
        lambda b: b.parts.producer.max_groups_in_flight,
        lambda b: b.service.load_watch._limit.now,
    ],
    "adapt_groups_in_flight": [lambda b: b.service.load_watch is not None],
    "eval_samples_in_flight": [lambda b: b.parts.slots.shares.slots(Kind.EVALUATION)],
    "dynamic_sampling_filter_path": [lambda b: b.service._filter._path, lambda b: b.groups._filter._path],
    "rollout_sample_hook_path": [lambda b: b.sampler(WithPreScoreHooks)._hooks._paths],
    "rollout_all_samples_process_path": [
        lambda b: b.groups._all_samples._path,
        lambda b: b.started(AllSamples)._path,
    ],
    "partial_rollout": [lambda b: b.groups.returns_partials],
    "mask_offpolicy_in_partial_rollout": [lambda b: b.groups._partial.mask_offpolicy],
    "max_staleness": [lambda b: b.groups._partial.max_staleness],
    "generate_timeout_seconds": [
        lambda b: b.parts.generate_seconds,
        lambda b: b.sampler(EngineSampler)._seconds,
        lambda b: b.groups._teacher._call_seconds,
        lambda b: b.started(OwnFunctions)._make("hooks.py:two")._function._seconds,
        lambda b: float(b.router_word("--request-timeout-secs")) - 1 - GRACE_SECONDS,
    ],
    "router_policy": [lambda b: b.router_word("--policy")],
    "openai_host": [lambda b: b.service._endpoint._address.host],
    "openai_port": [lambda b: b.service._endpoint._address.port],
    "eval_config": [lambda b: b.parts.evaluator._files.files[1].parent / "eval.toml"],
    "eval_prompt_data": [lambda b: (("one", b.parts.evaluator._files.files[0]),)],
    "eval_function_path": [lambda b: b.parts.evaluator._function._path],
    "group_rm": [lambda b: b.parts.evaluator._scores_groups],
    "reward_timeout_seconds": [lambda b: b.parts.scorer._item_seconds],
    "reward_patience_seconds": [lambda b: b.parts.scorer._patience_seconds],
    "reward_address": [lambda b: b.parts.scorer.target.address],
    "buffer_address": [lambda b: b.service._buffer._peer.removeprefix("the buffer at ")],
    "rollout_services": [lambda b: b.services],
    "start_timeout_seconds": [lambda b: same(b.watched("start_seconds"))],
    "rollout_health_check_interval": [lambda b: same(b.watched("check_interval_seconds"))],
    "rollout_health_check_timeout": [lambda b: same(b.watched("check_timeout_seconds"))],
    "rollout_num_gpus": [lambda b: sum(engine.shape.devices for engine in b.parts.fleet.engines)],
    "rollout_num_gpus_per_engine": [
        lambda b: b.parts.fleet.engines[0].shape.devices,
        lambda b: b.engine_options["shape"]["devices"],
    ],
    "rollout_max_engines": [lambda b: b.parts.scaler._capacity.most],
    "offload_rollout": [lambda b: b.parts.engine_memory is not None, lambda b: b.engine_options["releases_memory"]],
    "bf16": [lambda b: b.engine_options["dtype"] == "bfloat16"],
    "use_rollout_routing_replay": [
        lambda b: b.engine_options["returns_experts"],
        lambda b: b.service._router_client._further["return_routed_experts"],
        lambda b: b.sampler(EngineSampler)._num_layers == 2,
    ],
    "keep_sampling_mask": [
        lambda b: b.engine_options["mask_tokens"] == 4096,
        lambda b: b.service._router_client._mask_tokens == 4096,
        lambda b: b.sampler(EngineSampler)._mask_tokens == 4096,
    ],
    "opd_teacher_url": [lambda b: b.service._teacher._client._http.url],
    "update_weight_disk_path": [lambda b: b.parts.receiver._disk._root],
    "sample_log_bytes": [lambda b: b.groups._untrained_samples._max_bytes],
}

UNBOUNDED: Readers = {
    "over_sampling_batch_size": [lambda b: b.parts.producer.max_groups_in_flight / 2],
    "eval_exact_version": [lambda b: b.parts.slots.shares.slots(Kind.EVALUATION) == SAMPLES_AT_ONCE],
    "rollout_address": [lambda b: ",".join(b.job.services.rollout_address.split(",")[: int(b.services)])],
    "run_dir": [lambda b: b.parts.receiver._disk._root.parent.parent],
    "run_name": [lambda b: b.parts.receiver._disk._root.parent.name],
}
FUNCTION: Readers = {
    "update_weight_transport": [lambda b: "ipc" if b.parts.receiver._disk._root.is_relative_to("/dev/shm") else "disk"],
    "custom_generate_function_path": [lambda b: b.sampler(CustomGenerateSampler)._path],
    "generate_per_sample": [lambda b: b.sampler(CustomGenerateSampler)._per_sample],
    "generate_timeout_seconds": [lambda b: b.sampler(CustomGenerateSampler)._function._seconds],
    "max_turns": [lambda b: b.sampler(CustomGenerateSampler)._args.max_turns],
}
AGENTS: Readers = {
    "agent_function_path": [lambda b: b.started(AgentSampler)._path],
    "max_turns": [lambda b: b.started(AgentSampler)._limits.turns],
    "rollout_max_context_len": [lambda b: b.started(AgentSampler)._limits.context],
    "generate_timeout_seconds": [
        lambda b: b.started(AgentSampler)._limits.seconds,
        lambda b: b.started(AgentSampler)._sessions._limits.seconds,
        lambda b: getattr(player := b.started(AgentSampler).player, "_function", player)._seconds,
    ],
}
HOSTS: Readers = AGENTS | {
    "agent_hosts": [lambda b: b.parts.agent_hosts is not None],
}
STEPS: Readers = {
    "rollout_function_path": [
        lambda b: b.started(StepSampler)._path,
        lambda b: b.parts.evaluator._function._path,
    ],
    "rollout_timeout_seconds": [
        lambda b: b.started(StepSampler)._function._seconds,
        lambda b: b.parts.evaluator._function._function._seconds,
    ],
    "rollout_batch_size": [lambda b: b.started(StepSampler)._groups_per_step],
    "max_groups_in_flight": [lambda b: b.started(StepSampler).groups._most],
    "rollout_temperature": [
        lambda b: b.started(StepSampler)._params.temperature,
        lambda b: b.parts.evaluator._function._params.temperature,
    ],
}
SUPERVISED: Readers = {
    "loss_mask_type": [lambda b: b.groups._encoder._family],
    "keep_earlier_thoughts": [lambda b: b.groups._encoder._keep_earlier_thoughts],
    "apply_chat_template_kwargs": [lambda b: b.groups._encoder.variables],
    "trust_remote_code": [lambda b: b.groups._encoder._trust_remote_code],
    "hf_checkpoint": [lambda b: b.groups._encoder._hf_checkpoint],
}
EXTERNAL: Readers = {
    "rollout_external_engine_addrs": [lambda b: tuple(engine.url.removeprefix("http://") for engine in b.engines)],
    "rollout_num_gpus_per_engine": [lambda b: b.engines[0]._num_ranks],
}
ADAPTERS: Readers = {
    "lora_rank": [lambda b: b.engine_options["adapter_rank"]],
    "lora_target_modules": [lambda b: tuple(b.engine_options["adapted_layers"])],
}
GROUPS: Readers = {"engine_groups": [lambda b: (b.group(0), b.group(1))]}
OF_A_SERVER: Readers = {
    "hf_checkpoint": [lambda evaluator: evaluator._encoder._hf_checkpoint],
    "apply_chat_template": [lambda evaluator: evaluator._encoder._apply_chat_template],
    "rollout_seed": [lambda evaluator: evaluator._seed],
    "rollout_temperature": [lambda evaluator: evaluator._defaults.temperature],
    "generate_timeout_seconds": [lambda evaluator: evaluator._sampler._seconds],
    "eval_samples_in_flight": [lambda evaluator: evaluator._slots.shares.slots(Kind.EVALUATION)],
    "prompt_root": [lambda evaluator: evaluator._files.root],
    "group_rm": [lambda evaluator: evaluator._scores_groups],
    "reward_address": [lambda evaluator: evaluator._scorer.target.address],
    "reward_timeout_seconds": [lambda evaluator: evaluator._scorer._item_seconds],
    "reward_patience_seconds": [lambda evaluator: evaluator._scorer._patience_seconds],
}
"""Of an evaluation that asks a server of somebody else's."""

SHOWN_BY = {
    "insecure_sandbox": "test_the_sandbox_is_as_the_job_says, below",
    "rollout_placement": "tests/unit/rollout/engine/test_fleet.py: building its parts joins a Ray cluster",
    "colocate": "tests/unit/rollout/test_runs.py, of a run that joins",
    "rollout_runs": "tests/unit/rollout/test_runs.py",
    "rollout_run_requests": "tests/unit/rollout/test_runs.py",
    "tinker_port": "tests/e2e/test_tinker.py: no reward service is asked",
    "trace_sample_ratio": "tests/unit/test_traces.py, in a run of all services",
    "num_gpus_per_node": "tests/unit/rollout/engine/test_slurm_engine.py: building its parts needs an allocation",
}
"""Options that the service reads and this table does not compare, with the test that shows them."""
OF_OTHERS = {
    "input_key": "of an evaluation's request",
    "label_key": "of an evaluation's request",
    "metadata_key": "of an evaluation's request",
    "tool_key": "of an evaluation's request",
    "reward_key": "of an evaluation's request",
    "rm_type": "of an evaluation's request",
    "reward_parts": "of a sample",
    "master_port": "of a publication",
    "node_rank": "of an engine's machine",
    "vocab_size": "of config.json",
}
"""Attributes of something else that have an option's name."""


def sections(folder: Path) -> dict[str, dict[str, Any]]:
    """A job whose every option has an unusual value, but those of a variant below."""
    return {
        "model": {"hf_checkpoint": folder / "model", "trust_remote_code": True},
        "run": {"run_dir": folder / "runs", "run_name": "unusual"},
        "data": {
            "prompt_data": [f"{folder / 'data' / 'prompts.jsonl'}"],
            "data_source_path": "source.py:Source",
            "apply_chat_template": True,
            "apply_chat_template_kwargs": {"enable_thinking": False, "depth": 3},
            "rollout_seed": 4711,
        },
        "rollout": {
            "rollout_batch_size": 12,
            "n_samples_per_prompt": 8,
            "over_sampling_batch_size": 15,
            "max_groups_in_flight": 7,
            "rollout_temperature": 0.625,
            "rollout_top_p": 0.875,
            "rollout_top_k": 37,
            "rollout_max_response_len": 251,
            "rollout_max_prompt_len": 173,
            "rollout_max_context_len": 397,
            "rollout_stop": ["</end>"],
            "rollout_stop_token_ids": [11, 13],
            "dynamic_sampling_filter_path": "hooks.py:keep",
            "rollout_sample_hook_path": ["hooks.py:see", "hooks.py:change"],
            "rollout_all_samples_process_path": "hooks.py:all_of_them",
            "partial_rollout": True,
            "mask_offpolicy_in_partial_rollout": True,
            "generate_timeout_seconds": 91.0,
            "adapt_groups_in_flight": True,
            "openai_host": "127.0.0.3",
            "openai_port": 7219,
            "router_policy": "cache_aware",
            "rollout_timeout_seconds": 407.0,
            "max_turns": 17,
        },
        "reward": {"group_rm": True, "reward_timeout_seconds": 53.0, "reward_patience_seconds": 71.0},
        "train": {"use_rollout_routing_replay": True, "keep_sampling_mask": True},
        "distillation": {"opd_teacher_url": "http://127.0.0.1:7309"},
        "buffer": {"max_staleness": 5, "prompt_root": folder / "root"},
        "publish": {"update_weight_disk_path": folder / "versions"},
        "eval": {
            "eval_prompt_data": [("one", folder / "one.jsonl")],
            "eval_config": folder / "eval.toml",
            "eval_function_path": "hooks.py:evaluate",
            "eval_samples_in_flight": 23,
        },
        "services": {
            "buffer_address": "127.0.0.1:7001",
            "reward_address": "127.0.0.1:7002",
            "rollout_services": 2,
            "start_timeout_seconds": 811.0,
        },
        "placement": {
            "rollout_num_gpus": 6,
            "rollout_num_gpus_per_engine": 2,
            "rollout_max_engines": 5,
            "offload_rollout": True,
            "rollout_health_check_interval": 0.75,
            "rollout_health_check_timeout": 3.25,
        },
        "tracking": {"sample_log_bytes": 123_456},
        "megatron": {"bf16": True},
        "sglang": {"context_length": 1031},
    }


VARIANTS: Mapping[str, tuple[Sections, Readers]] = {
    "engines": ({}, ENGINES),
    "unbounded": (
        {
            "rollout": {"max_groups_in_flight": None},
            "eval": {"eval_samples_in_flight": None, "eval_exact_version": True},
            "publish": {"update_weight_disk_path": None},
            "services": {"rollout_services": 1, "rollout_address": "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3,127.0.0.1:4"},
        },
        UNBOUNDED,
    ),
    "function": (
        {
            "rollout": {"custom_generate_function_path": "hooks.py:generate", "generate_per_sample": True},
            "publish": {"update_weight_transport": "ipc"},
        },
        FUNCTION,
    ),
    "agents": ({"rollout": {"agent_function_path": "hooks.py:play"}}, AGENTS),
    "hosts": ({"rollout": {"agent_function_path": "hooks.py:play", "agent_hosts": True}}, HOSTS),
    "steps": (
        {"rollout": {"rollout_function_path": "hooks.py:step"}, "eval": {"eval_function_path": None}},
        STEPS,
    ),
    "supervised": ({"train": {"loss_mask_type": "qwen", "keep_earlier_thoughts": True}}, SUPERVISED),
    "external": (
        {"placement": {"rollout_external_engine_addrs": ["127.0.0.1:7103", "127.0.0.1:7107"]}},
        EXTERNAL,
    ),
    "adapters": (
        {
            "lora": {"lora_rank": 3, "lora_target_modules": ["k_proj", "q_proj"]},
            "publish": {"update_weight_transport": "adapter"},
        },
        ADAPTERS,
    ),
    "groups": (
        {
            "placement": {
                "engine_groups": [
                    {"name": "long", "num_engines": 1, "num_gpus_per_engine": 4, "overrides": {"page_size": 16}},
                    {"name": "short", "num_engines": 2, "num_gpus_per_engine": 1, "overrides": {"page_size": 4}},
                ]
            }
        },
        GROUPS,
    ),
}
"""Options that exclude each other are in different jobs."""


def job_of(folder: Path, variant: Sections) -> Job:
    of_all = sections(folder)
    return Job.model_validate(of_all | {name: of_all.get(name, {}) | dict(of_one) for name, of_one in variant.items()})


@asynccontextmanager
async def built(folder: Path, job: Job) -> AsyncIterator[Built]:
    factory = sglang_factory(job, folder / "logs", has_accelerator=False)
    service = rollout_service(job, factory, folder / "logs", CollectorRegistry(), folder / "samples")
    try:
        yield Built(job, service, [factory(number) for number in (0, 1)])
    finally:
        await service.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    make_tiny_vision(folder / "model")
    (folder / "eval.toml").write_text(
        '[[datasets]]\nname = "two"\npath = "two.jsonl"\ncustom_generate_function_path = "hooks.py:two"\n'
    )
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
async def test_the_parts_have_the_values_that_the_job_gives(folder: Path, variant: str) -> None:
    changes, readers = VARIANTS[variant]
    async with built(folder, job_of(folder, changes)) as parts:
        lines = ignored(parts.job, parts, readers)
    assert not lines, "\n".join(lines)


async def test_every_option_that_the_service_reads_is_compared(folder: Path) -> None:
    source = Path(program.__file__).parent
    read = options_named_in([path for path in source.rglob("*.py") if path.name != "check.py"])
    for changes, _ in VARIANTS.values():
        job = job_of(folder, changes)
        with options_read() as now:
            async with built(folder, job):
                read |= now
    compared = {option for _, readers in VARIANTS.values() for option in readers}
    assert sorted(read - compared - set(SHOWN_BY) - set(OF_OTHERS)) == [], "compare them above"
    assert sorted((set(SHOWN_BY) | set(OF_OTHERS)) - read) == [], "nothing reads these any more"


async def test_an_evaluation_of_a_server_has_the_values_that_the_job_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, lines = job_of(folder, {}), list[str]()

    class Compared(EvalRunner):
        async def run(self, datasets: object) -> AsyncGenerator[Progress, None]:
            lines.extend(ignored(job, self, OF_A_SERVER))
            yield Progress(0, 0)

    monkeypatch.setattr(by_url, "EvalRunner", Compared)
    with options_read() as read:
        await by_url.evaluate_url(job, "http://127.0.0.1:9", "m", [], return_samples=False)
    assert not lines, "\n".join(lines)
    assert read <= {*OF_A_SERVER, *ENGINES}, "compare them above"
