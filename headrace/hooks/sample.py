"""The Sample that hooks see: mutable, with the names that code written for slime uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headrace.errors import InvalidArgument
from headrace.trajectory import Status as SampleStatus


@dataclass
class SampleSpecInfo:
    """Statistics of speculative decoding for this sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted draft tokens over draft tokens; 0 without any."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens for each verification; 0 without any."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Counts one engine answer."""
        self.spec_accept_token_num += _first(meta_info, "spec_accept_token_num", "spec_num_correct_drafts")
        self.spec_draft_token_num += _first(meta_info, "spec_draft_token_num", "spec_num_proposed_drafts")
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


def _first(meta_info: Mapping[str, Any], *names: str) -> int:
    """SGLang has given these counts other names since slime's functions were written."""
    return next((meta_info[name] for name in names if name in meta_info), 0)


@dataclass
class SamplePrefixCacheInfo:
    """Statistics of the engine's prefix cache for this sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached prompt tokens over prompt tokens; 0 without any."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Counts one engine answer."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


_FINISH_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


@dataclass
class Sample:
    """One prompt and what was made of it. `headrace.hooks.convert` turns it into a `headrace.trajectory.Sample`."""

    Status = SampleStatus
    SpecInfo = SampleSpecInfo
    PrefixCacheInfo = SamplePrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | dict[str, Any] | list[Any] | None = None
    """The row's: text, or the object or list that it holds."""
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """1 where trained, of length response_length; None trains all of the response."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    """Anything numpy reads as an int16 array [T - 1, layers, top-k]."""
    rollout_sampling_mask: list[list[int]] | None = None
    """The token ids that each response token was sampled from; none where that was the whole vocabulary. Without
    --keep-sampling-mask: None."""
    remove_sample: bool = False
    """Keep it out of the loss, by an all-zero mask."""
    teacher_log_probs: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    rollout_id: str | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    """Seconds in tools and environments."""
    spec_info: SampleSpecInfo = field(default_factory=SampleSpecInfo)
    prefix_cache_info: SamplePrefixCacheInfo = field(default_factory=SamplePrefixCacheInfo)
    turns: list[dict[str, Any]] | None = None
    """The conversation by role and content, as `headrace samples` shows it; the kit sets it."""
    failure_reason: str | None = None
    """The reason of status FAILED, in one sentence."""

    @property
    def effective_response_length(self) -> int:
        """The number of trained tokens."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def get_reward_value(self, args: Any) -> float:
        """The scalar that is trained on. Raises InvalidArgument when the reward does not hold it."""
        reward = self.reward
        if isinstance(reward, dict):
            if args.reward_key is None:
                raise InvalidArgument(f"the reward has the parts {sorted(reward)}: choose one with --reward-key")
            if args.reward_key not in reward:
                raise InvalidArgument(f"--reward-key {args.reward_key} is not among the parts {sorted(reward)}")
            reward = reward[args.reward_key]
        if reward is None:
            raise InvalidArgument(f"sample {self.index} has no reward yet")
        return float(reward)

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Takes status, versions and counts from one answer of the engine's `/generate`."""
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        spans = meta_info.get("weight_versions") or ()
        if spans:  # weights were published while it was written
            self.weight_versions += [span["version"] for span in spans]
        elif "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = _FINISH_STATUS[meta_info["finish_reason"]["type"]]

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Appends tokens to the response, with their mask and log-probs; `sample.tokens` holds the prompt before.

        Sampled tokens (`trainable`) come with log_probs and the answer's meta_info, those of tools and environments
        with neither. `text` is appended to `response`. `meta_info` sets status, versions and counts, unless
        `update_terminal_info` is False: then the status stays. Raises InvalidArgument for lists of different lengths.
        """
        added = [int(token) for token in tokens]
        given = None if log_probs is None else [float(value) for value in log_probs]
        if given is not None and len(given) != len(added):
            raise InvalidArgument(f"log_probs has {len(given)} entries, tokens has {len(added)}: give one for each")
        if trainable and added and given is None:
            raise InvalidArgument(
                "trainable tokens have no log_probs: ask the engine with return_logprob, or pass trainable=False for "
                "tokens that the policy did not sample"
            )
        if not trainable and any(given or ()):
            raise InvalidArgument("log_probs of tokens that are not trained must be 0.0, or be left out")
        before = self.response_length
        self.loss_mask = [*([1] * before if self.loss_mask is None else self.loss_mask), *[int(trainable)] * len(added)]
        known = [0.0] * before if self.rollout_log_probs is None else self.rollout_log_probs
        self.rollout_log_probs = [*known, *(given or [0.0] * len(added))]
        self.tokens = [*self.tokens, *added]
        self.response_length = before + len(added)
        self.response += text or ""
        if meta_info is not None:
            status = self.status
            self.update_from_meta_info(args, meta_info)
            self.status = self.status if update_terminal_info else status

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` reads them back."""
        return asdict(self) | {"status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The sample of `to_dict`; keys that are no fields are refused by InvalidArgument."""
        unknown = data.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise InvalidArgument(f"Sample has no {sorted(unknown)}: put what is yours into metadata")
        values = dict(data)
        values["status"] = SampleStatus(values.get("status", "pending"))
        values["spec_info"] = SampleSpecInfo(**values.get("spec_info", {}))
        values["prefix_cache_info"] = SamplePrefixCacheInfo(**values.get("prefix_cache_info", {}))
        return cls(**values)
