"""The sections of a job that say where samples come from: prompts, rollouts, rewards, evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.errors import ConfigError
from headrace.job.schema.placement import EngineGroup
from headrace.job.schema.section import (
    Above,
    FromJson,
    NonNegative,
    Port,
    Positive,
    Seconds,
    Section,
    Seed,
    Share,
    Temperature,
    normalize,
)
from headrace.limits import MAX_FILE_WORKERS, MAX_SAMPLES_PER_GROUP
from headrace.models.architecture import Architecture

COMMAND_AGENT = "headrace.hooks.agent_command.run"
"""The agent function that plays `agent_command`."""


def _several(value: Any) -> Any:
    """Accepts one value where several are allowed."""
    return (str(value),) if isinstance(value, str | Path) else value


def _not_yaml(path: Path) -> Path:
    if path.suffix in (".yaml", ".yml"):
        raise ValueError("write the data sets as TOML, under the same keys, as docs/evaluation.md shows")
    return path


def _of_images(keys: dict[str, str]) -> dict[str, str]:
    if others := sorted(keys.keys() - {"image"}):
        raise ValueError(f"media of type {others[0]!r} are not supported, only images")
    return keys


def _resolved(name: str, value: int | None) -> int:
    if value is None:
        raise ConfigError(f"{name} is absent: a service takes the resolved job, which has it")
    return value


class DataSection(Section):
    prompt_data: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    """JSONL, Parquet, JSON or CSV of prompts, PATH or PATH@[a:b], or OWNER/NAME:SPLIT of the hub; absent: SubmitPrompts
    brings them."""
    prompt_data_weights: tuple[Above, ...] = ()
    """Each file's share of every trained batch, relative to the others; absent: equal shares."""
    streaming_data: bool = False
    """Read prompt_data in blocks and keep none of it in memory."""
    num_data_workers: Annotated[Positive, Field(le=MAX_FILE_WORKERS)] = 1
    """Processes that parse a streamed file's blocks ahead."""
    data_source_path: str | None = None
    """pkg.mod.Class or file.py:Class with get_samples(n); its dataset is prompt_data."""
    input_key: str = "prompt"
    """Key of the prompt: text, or an array of chat messages."""
    label_key: str | None = None
    """Key of the reference answer; a.b is b of the object a."""
    metadata_key: str | None = "metadata"
    """Key of an object for rewards and hooks."""
    tool_key: str | None = None
    """Key of an array of tool definitions."""
    multimodal_keys: Annotated[dict[str, str], AfterValidator(_of_images), FromJson] = Field({})
    """JSON object that maps a media type to the key of its files, as {"image": "images"}; each <image> of the prompt
    stands for one."""
    priority_key: str | None = None
    """Key of an integer; with selection priority a larger one goes first."""
    apply_chat_template: bool = False
    """Text prompts become one user turn of the chat template."""
    apply_chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(normalize), FromJson] = Field({})
    """JSON object of the chat template's own variables, as {"enable_thinking": false}."""
    rollout_shuffle: bool = False
    """Read every epoch in a new order."""
    rollout_seed: Seed = 42
    """Seed of rollout_shuffle's order and of the engines' sampling."""
    num_epoch: Positive | None = None
    """Largest number of epochs of prompt_data; absent: no limit."""
    skip_bad_lines: bool = False
    """Count and skip lines that do not parse; off: refuse them."""

    @property
    def image_key(self) -> str | None:
        """The key of a row's images."""
        return self.multimodal_keys.get("image")


class RolloutSection(Section):
    num_rollout: Positive = 100
    """Rollout steps in the run."""
    rollout_batch_size: Positive | None = None
    """Prompts (groups) in a step; may be derived."""
    n_samples_per_prompt: Annotated[Positive, Field(le=MAX_SAMPLES_PER_GROUP)] | None = None
    """Samples in a group; may be derived."""
    over_sampling_batch_size: Positive | None = None
    """Groups in production for a step, so that it fills although some are dropped; absent: rollout_batch_size."""
    rollout_temperature: Temperature = 1.0
    """Temperature of sampling: logits are divided by it."""
    rollout_top_p: Share = 1.0
    """Nucleus sampling: the share of probability to sample from."""
    rollout_top_k: Positive | None = None
    """Sample from the k most likely tokens; absent: from all."""
    rollout_max_response_len: Positive = 1024
    """Largest number of response tokens."""
    rollout_max_prompt_len: Positive | None = None
    """Longer prompts are dropped, and counted."""
    rollout_max_context_len: Positive | None = None
    """Largest number of prompt and response tokens together."""
    rollout_stop: tuple[str, ...] = ()
    """Stop strings."""
    rollout_stop_token_ids: tuple[NonNegative, ...] = ()
    """Token ids that end a response."""
    dynamic_sampling_filter_path: str | None = None
    """pkg.mod.fn or file.py:fn that keeps or drops a scored group; dropped ones are replaced."""
    rollout_sample_hook_path: tuple[str, ...] = ()
    """pkg.mod.fn or file.py:fn, one or several, that see each generated sample before it is scored, and may change it:
    def f(args, sample, evaluation=False)."""
    rollout_all_samples_process_path: str | None = None
    """pkg.mod.fn or file.py:fn that is shown all samples of a step, of dropped groups too: def f(args, all_samples,
    data_source)."""
    partial_rollout: bool = False
    """Keep the tokens of interrupted groups and continue from them."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train a partial rollout's tokens of older policies."""
    custom_generate_function_path: str | None = None
    """pkg.mod.fn or file.py:fn that generates."""
    agent_function_path: str | None = None
    """pkg.mod.fn or file.py:fn that plays a prompt against an OpenAI-compatible URL: async def run(args, task,
    base_url)."""
    agent_command: str | None = None
    """A command line that plays a prompt in a fresh folder, in place of a function: "codex exec …". {prompt},
    {base_url} and {here} stand for the prompt, the session's URL and the folder of the rollout service; without
    {prompt} the prompt is on its standard input."""
    agent_reward_command: str | None = None
    """A command line that runs in that folder afterwards: its last line is the reward, or its exit code 0 or 1."""
    agent_hosts: bool = False
    """agent_function_path is played by `headrace agent`, in processes that may be anywhere, and not by the rollout
    service's own."""
    openai_host: str = "127.0.0.1"
    """Address of the OpenAI-compatible endpoint, under which agents find it; one that other machines reach needs
    insecure."""
    rollout_function_path: str | None = None
    """pkg.mod.fn or file.py:fn that makes all groups of a step: def f(args, rollout_id, data_source,
    evaluation=False)."""
    rollout_timeout_seconds: Seconds = 3600.0
    """Limit of one call of rollout_function_path, and of one evaluation, whose row then says so."""
    openai_port: Port | None = None
    """Port of the OpenAI-compatible endpoint, and of several rollout services those after it; absent: any free one,
    with agent_function_path alone."""
    generate_per_sample: bool = False
    """Call a generate function that takes a list of samples once for each sample, all at the same time."""
    max_turns: Positive | None = None
    """Largest number of an agent's turns; custom generate functions read it."""
    generate_timeout_seconds: Seconds = 600.0
    """Limit of one sample's generation."""
    max_groups_in_flight: Positive | None = None
    """Groups generated at once by a rollout service; absent: two steps' worth, or of several services their share."""
    adapt_groups_in_flight: bool = False
    """Lower the number of groups generated at once while engines say that requests queue or their cache is full, and
    raise it to max_groups_in_flight again; off: it is fixed."""
    max_failed_share: Share = 0.5
    """The run ends, with the reasons, when a larger share of the latest samples failed, or none of ten times as many
    could be used; 1: never."""
    router_policy: Literal["manual", "cache_aware", "round_robin", "random"] = "manual"
    """How sglang-router picks an engine; manual: samples of one prompt, and an agent's requests, go to one engine
    together."""

    @model_validator(mode="before")
    @classmethod
    def _command_is_an_agent(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("agent_command") is None:
            return values
        if (path := values.get("agent_function_path")) not in (None, COMMAND_AGENT):
            raise ConfigError(f"agent_command and agent_function_path {path} both play a prompt: leave one of them out")
        return {**values, "agent_function_path": COMMAND_AGENT}

    @model_validator(mode="after")
    def _room_for_a_prompt(self) -> Self:
        limit, response = self.rollout_max_context_len, self.rollout_max_response_len
        if limit is not None and limit <= response:
            raise ConfigError(
                f"rollout_max_context_len {limit} leaves no room for a prompt beside rollout_max_response_len "
                f"{response}: raise it, or lower that"
            )
        return self

    @property
    def user_function(self) -> str | None:
        """The user's function that makes the samples, if one does."""
        return self.rollout_function_path or self.custom_generate_function_path or self.agent_function_path

    @property
    def groups_per_step(self) -> int:
        """Raises ConfigError where the job is not resolved."""
        return _resolved("rollout_batch_size", self.rollout_batch_size)

    @property
    def samples_per_group(self) -> int:
        """Raises ConfigError where the job is not resolved."""
        return _resolved("n_samples_per_prompt", self.n_samples_per_prompt)


class EvalSection(Section):
    eval_prompt_data: tuple[tuple[str, Path], ...] = ()
    """NAME and PATH or PATH@[a:b] of an evaluation, or OWNER/NAME:SPLIT of the hub; repeatable."""
    eval_config: Annotated[Path, AfterValidator(_not_yaml)] | None = None
    """TOML file of data sets with their own sampling, lengths, keys, scorer and interval, as in docs/evaluation.md;
    beside eval_prompt_data."""
    eval_function_path: str | None = None
    """pkg.mod.fn or file.py:fn that evaluates, called as a rollout_function_path with evaluation=True; absent: that
    one, if it takes `evaluation`."""
    eval_interval: Positive | None = None
    """Rollout steps between evaluations; absent: first and last."""
    n_samples_per_eval_prompt: Positive = 1
    """Samples for each prompt of an evaluation."""
    eval_temperature: Temperature | None = None
    """Temperature of evaluations, 0 is greedy; absent: greedy, or rollout_temperature with several samples a prompt or
    eval_top_p."""
    eval_top_p: Share | None = None
    """Nucleus sampling of evaluations; absent: rollout_top_p."""
    eval_top_k: Positive | None = None
    """Evaluations sample from the k most likely tokens; absent: rollout_top_k."""
    skip_eval_before_train: bool = False
    """Evaluate for the first time after eval_interval steps, not before training."""
    eval_max_response_len: Positive | None = None
    """Largest number of response tokens in evaluations; absent: rollout_max_response_len."""
    eval_min_new_tokens: NonNegative | None = None
    """Least number of response tokens in evaluations; absent: 0."""
    eval_max_prompt_len: Positive | None = None
    """In evaluations, samples of longer prompts fail, and are counted; absent: no limit."""
    eval_max_context_len: Positive | None = None
    """Largest number of prompt and response tokens together in evaluations; absent: rollout_max_context_len."""
    eval_input_key: str | None = None
    """Key of the prompt in evaluation data; absent: input_key."""
    eval_label_key: str | None = None
    """Key of the reference answer there; absent: label_key."""
    eval_tool_key: str | None = None
    """Key of the tool definitions there; absent: tool_key."""
    eval_reward_key: str | None = None
    """Of dict rewards, the part that evaluations report; absent: reward_key."""
    eval_exact_version: bool = False
    """Training waits for each evaluation, so that one version generates all its samples; off: it goes on, and
    eval_min_version and eval_max_version say which versions answered."""
    eval_samples_in_flight: Positive | None = None
    """Samples of evaluations generated at once while training's are generated too; absent: one for each eight that
    training may have, or 64 with eval_exact_version. While training generates none, 64."""

    @property
    def is_asked_for(self) -> bool:
        """True for a job that names data to evaluate on."""
        return bool(self.eval_prompt_data) or self.eval_config is not None


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """`name` is the option that sets the limit, or a description of it."""

    tokens: int
    name: str

    @classmethod
    def of(
        cls,
        rollout: RolloutSection,
        sglang: Mapping[str, Any],
        architecture: Architecture,
        groups: Sequence[EngineGroup] = (),
    ) -> ContextLimit:
        """The job's own limit if it has one, else that of its engines."""
        if rollout.rollout_max_context_len is not None:
            return cls(rollout.rollout_max_context_len, "rollout_max_context_len")
        return cls.of_engines(sglang, architecture, groups)

    @classmethod
    def of_engines(
        cls, sglang: Mapping[str, Any], architecture: Architecture, groups: Sequence[EngineGroup] = ()
    ) -> ContextLimit:
        """The length beyond which an engine refuses a request: of groups the shortest, as the router chooses any."""
        own = [
            cls(group.overrides["context_length"], f"context_length of engine group {group.name}")
            for group in groups
            if "context_length" in group.overrides
        ]
        others = [cls._of_all(sglang, architecture)] if len(own) < len(groups) or not groups else []
        return min(others + own, key=lambda limit: limit.tokens)

    @classmethod
    def _of_all(cls, sglang: Mapping[str, Any], architecture: Architecture) -> ContextLimit:
        given = sglang.get("context_length")
        if given is not None:
            return cls(given, "--sglang-context-length")
        return cls(architecture.max_position_embeddings, "the model's max_position_embeddings")

    def too_long(self, num_tokens: int) -> str:
        """A message for a prompt that leaves no room for a response."""
        length = f"the prompt has {num_tokens:,} tokens, which leaves no room for a response"
        return f"{length}: {self.name} is {self.tokens:,}"
