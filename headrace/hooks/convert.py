"""Converts between the frozen Sample of the wire and the mutable one of hooks."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgument
from headrace.hooks.sample import Sample, SamplePrefixCacheInfo, SampleSpecInfo
from headrace.images import processed_columns, processed_of, raw_columns, raw_of
from headrace.limits import to_json
from headrace.prompts import label_as_given, label_for_hooks, label_mark, label_text
from headrace.trajectory import (
    LOSS_MASK,
    ROLLOUT_LOG_PROBS,
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    SAMPLING_MASK_COUNTS,
    TEACHER_LOG_PROBS,
    TOKENS,
    TURNS,
    Failure,
    PolicyRange,
    bounded_turns,
    check_text,
)
from headrace.trajectory import Sample as WireSample


def to_hook(sample: WireSample, group_index: int | None = None) -> Sample:
    """The sample as hooks see it; arrays become lists."""
    teacher, kept = sample.columns.get("teacher_log_probs"), _Kept.of(sample)
    return Sample(
        group_index=kept.group_index if group_index is None else group_index,
        index=sample.index,
        prompt=sample.prompt if kept.messages is None else kept.messages,
        tokens=sample.tokens.tolist(),
        response=sample.response,
        response_length=sample.response_length,
        label=label_for_hooks(sample.label, sample.hook_fields),
        reward=dict(sample.reward_parts) or sample.reward,
        loss_mask=sample.loss_mask.tolist(),
        weight_versions=kept.weight_versions or [str(r.policy_version) for r in sample.policy_ranges],
        rollout_log_probs=sample.rollout_log_probs.tolist(),
        rollout_routed_experts=sample.columns.get(ROUTED_EXPERTS),
        rollout_sampling_mask=_kept_ids(sample),
        teacher_log_probs=None if teacher is None else teacher.tolist(),
        status=sample.status,
        metadata=dict(sample.metadata),
        train_metadata=dict(sample.train_metadata) or None,
        rollout_id=sample.rollout_id or None,
        failure_reason=sample.failure.message if sample.failure else None,
        remove_sample=kept.remove_sample,
        generate_function_path=kept.generate_function_path,
        custom_rm_path=kept.custom_rm_path,
        multimodal_inputs=raw_of(sample.columns),
        multimodal_train_inputs=processed_of(sample.columns),
        session_id=kept.session_id,
        turns=kept.turns,
        non_generation_time=kept.non_generation_time,
        spec_info=kept.spec_info,
        prefix_cache_info=kept.prefix_cache_info,
    )


def from_hook(
    sample: Sample,
    *,
    sample_id: str,
    group_id: str,
    index: int,
    rendered_prompt: str | None = None,
    policy_ranges: Sequence[PolicyRange] = (),
    sampling_params: dict[str, Any] | None = None,
) -> WireSample:
    """The sample as it travels, without its reward. Raises InvalidArgument for contradictions, naming the field.

    Without `policy_ranges` the oldest of the sample's weight_versions counts for all of its response: a hook keeps the
    versions of its requests, not their token ranges, and staleness must not be understated. `rendered_prompt` is the
    text of a prompt that the hook has as messages.
    """
    name = f"sample {sample_id}:"
    length = _length(name, sample)
    _check_kinds(name, sample)
    return WireSample(
        sample_id=sample_id,
        group_id=group_id,
        index=index,
        rollout_id=sample.rollout_id or sample_id,
        prompt=_prompt_text(name, sample.prompt, rendered_prompt),
        response=sample.response,
        tokens=_integers(f"{name} {TOKENS}", sample.tokens, np.int32),
        loss_mask=_mask(f"{name} {LOSS_MASK}", sample, length),
        rollout_log_probs=_log_probs(name, sample, length),
        status=sample.status,
        failure=_failure(sample),
        label=label_text(sample.label, f"{name} label"),
        metadata=sample.metadata,
        train_metadata=sample.train_metadata or {},
        sampling_params=sampling_params or {},
        policy_ranges=tuple(policy_ranges) or _oldest(name, sample, length),
        tags=_tags(sample),
        columns=_columns(name, sample),
        hook_fields=_Kept.fields_of(name, sample),
    )


def cache_and_speculation(sample: WireSample) -> tuple[SampleSpecInfo, SamplePrefixCacheInfo]:
    """Returns what engines counted for the sample: zeros where nobody has written that down."""
    kept = _Kept.of(sample)
    return kept.spec_info, kept.prefix_cache_info


class _Kept(msgspec.Struct):
    """The fields that users' functions alone read, as they are in `hook_fields`."""

    group_index: int | None = None
    messages: list[dict[str, Any]] | None = None
    session_id: str | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    label_is_json: bool = False
    turns: list[dict[str, Any]] | None = None
    weight_versions: list[str] = []
    remove_sample: bool = False
    non_generation_time: float = 0.0
    spec_info: SampleSpecInfo = msgspec.field(default_factory=SampleSpecInfo)
    prefix_cache_info: SamplePrefixCacheInfo = msgspec.field(default_factory=SamplePrefixCacheInfo)

    @classmethod
    def of(cls, sample: WireSample) -> _Kept:
        """Reads what a function has set. Another producer may have written anything there: that is left out."""
        try:
            return msgspec.convert(dict(sample.hook_fields), cls)
        except msgspec.ValidationError:
            return cls()

    @classmethod
    def fields_of(cls, name: str, sample: Sample) -> dict[str, Any]:
        """Returns what is not at its default. Raises InvalidArgument for what could not be read back."""
        values = {field: getattr(sample, field) for field in cls.__struct_fields__ if hasattr(sample, field)}
        values |= label_mark(sample.label)
        values[TURNS] = bounded_turns(sample.turns) if sample.turns else None
        values["weight_versions"] = list(sample.weight_versions)
        values["messages"] = sample.prompt if isinstance(sample.prompt, list) else None
        defaults = msgspec.to_builtins(cls())
        try:
            fields: dict[str, Any] = msgspec.to_builtins(cls(**values))
            msgspec.convert(fields, cls)
            fields = {field: value for field, value in fields.items() if value != defaults[field]}
            to_json(fields)
        except (InvalidArgument, msgspec.ValidationError, TypeError) as error:
            raise InvalidArgument(f"{name} {error}") from error
        return fields


def _length(name: str, sample: Sample) -> int:
    length = sample.response_length
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise InvalidArgument(f"{name} response_length is {length!r:.80}, must be an integer of 0 or more")
    if not isinstance(sample.tokens, Sized) or length > len(sample.tokens):
        raise InvalidArgument(f"{name} response_length is {length}, and tokens are {_kind(sample.tokens)}")
    return length


def _check_kinds(name: str, sample: Sample) -> None:
    if not isinstance(sample.status, Sample.Status):
        raise InvalidArgument(f"{name} status is {sample.status!r:.80}, must be one of Sample.Status")
    for field, mapping in (("metadata", sample.metadata), ("train_metadata", sample.train_metadata or {})):
        if not isinstance(mapping, dict):
            raise InvalidArgument(f"{name} {field} is {_kind(mapping)}, must be a dict")
        try:
            to_json(mapping)
        except InvalidArgument as error:
            raise InvalidArgument(f"{name} {field}: {error.message}") from error
    if sample.failure_reason is not None:
        check_text(f"{name} failure_reason", sample.failure_reason)
    for field, value, kind in (
        ("non_generation_time", sample.non_generation_time, int | float),
        ("spec_info", sample.spec_info, Sample.SpecInfo),
        ("prefix_cache_info", sample.prefix_cache_info, Sample.PrefixCacheInfo),
    ):
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name} {field} is {_kind(value)}: leave it as it was")


def _array(name: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor that has a gradient
        raise InvalidArgument(f"{name} is no array of numbers: {error}") from error


def _integers(name: str, values: Any, dtype: type[np.signedinteger[Any]]) -> NDArray[Any]:
    """Converts to another integer type when it can hold every value: nothing wraps, nothing is cut."""
    found = _array(name, values)
    if not found.size:
        return found.astype(dtype)
    if found.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} is of {found.dtype}, must be integers")
    limits = np.iinfo(dtype)
    if found.min() < limits.min or found.max() > limits.max:
        raise InvalidArgument(f"{name} has values from {found.min()} to {found.max()}, {limits.dtype} cannot hold them")
    return found.astype(dtype)


def _mask(name: str, sample: Sample, length: int) -> NDArray[np.uint8]:
    """0 and 1, be they written as integers, floats or booleans."""
    given = np.ones(length, dtype=np.uint8) if sample.loss_mask is None else _array(name, sample.loss_mask)
    if given.shape != (length,):
        raise InvalidArgument(f"{name} is {list(given.shape)}, response_length is {length}: one entry for each token")
    if length and given.dtype.kind not in "biuf":
        raise InvalidArgument(f"{name} is of {given.dtype}, must be 0 or 1 for each token")
    if (wrong := (given != 0) & (given != 1)).any():
        raise InvalidArgument(f"{name}[{int(np.flatnonzero(wrong)[0])}] is {given[wrong][0]}, must be 0 or 1")
    return np.zeros(length, np.uint8) if sample.remove_sample else given.astype(np.uint8)


def _floats(name: str, values: Any) -> NDArray[np.float32]:
    found = _array(name, values)
    if found.size and found.dtype.kind not in "iuf":
        raise InvalidArgument(f"{name} is of {found.dtype}, must be numbers")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
        return found.astype(np.float32)


def _log_probs(name: str, sample: Sample, length: int) -> NDArray[np.float32]:
    if sample.rollout_log_probs is None:
        if length == 0:
            return np.zeros(0, np.float32)
        raise InvalidArgument(
            f"{name} rollout_log_probs is None for {length} response tokens: ask the "
            "engine with return_logprob and append them; tokens that the policy did not sample "
            "take 0.0 and a loss_mask of 0"
        )
    return _floats(f"{name} {ROLLOUT_LOG_PROBS}", sample.rollout_log_probs)


def _failure(sample: Sample) -> Failure | None:
    if sample.status is not Sample.Status.FAILED:
        return None
    return Failure("HOOK_FAILED", sample.failure_reason or "the generate function set the status to FAILED")


def _oldest(name: str, sample: Sample, length: int) -> tuple[PolicyRange, ...]:
    if not sample.weight_versions or not length:
        return ()
    try:
        return (PolicyRange(min(int(v) for v in sample.weight_versions), 0, length),)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{name} weight_versions are {sample.weight_versions!r:.80}, must be numbers") from error


def _columns(name: str, sample: Sample) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if sample.teacher_log_probs is not None:
        columns[TEACHER_LOG_PROBS] = _floats(f"{name} {TEACHER_LOG_PROBS}", sample.teacher_log_probs)
    if sample.rollout_routed_experts is not None:
        columns[ROUTED_EXPERTS] = _integers(f"{name} {ROUTED_EXPERTS}", sample.rollout_routed_experts, np.int16)
    if sample.rollout_sampling_mask is not None:
        sets = [_integers(f"{name} {SAMPLING_MASK}", ids, np.int32) for ids in sample.rollout_sampling_mask]
        columns[SAMPLING_MASK] = np.concatenate([np.empty(0, np.int32), *sets])
        columns[SAMPLING_MASK_COUNTS] = np.array([len(ids) for ids in sets], np.int32)
    columns |= raw_columns(name, sample.multimodal_inputs)
    return columns | processed_columns(name, sample.multimodal_train_inputs)


def _kept_ids(sample: WireSample) -> list[list[int]] | None:
    mask = sample.columns.get(SAMPLING_MASK)
    if mask is None:
        return None
    ends = np.cumsum(sample.columns[SAMPLING_MASK_COUNTS])
    return [ids.tolist() for ids in np.split(mask, ends[:-1])][: len(ends)]


def _kind(value: Any) -> str:
    return f"{len(value)} of them" if isinstance(value, Sized) else type(value).__name__


def _tags(sample: Sample) -> dict[str, str]:
    tags = {"non_generation_seconds": f"{sample.non_generation_time:g}"} if sample.non_generation_time else {}
    for name, info, empty in (
        ("spec_info", sample.spec_info, Sample.SpecInfo()),
        ("prefix_cache_info", sample.prefix_cache_info, Sample.PrefixCacheInfo()),
    ):
        if info != empty:
            tags |= {f"{name}.{key}": str(value) for key, value in vars(info).items()}
    return tags


def _prompt_text(name: str, prompt: Any, rendered: str | None) -> str:
    if isinstance(prompt, str):
        return prompt
    if rendered is not None and isinstance(prompt, list):
        return rendered
    return _joined(name, prompt)


def _joined(name: str, messages: Any) -> str:
    try:
        return "\n".join(f"{m['role']}: {m['content']}" for m in messages)
    except (KeyError, TypeError) as error:
        raise InvalidArgument(f"{name} prompt is neither text nor messages with role and content") from error


# A sample on its way out of its worker process: of headrace's own class, with plain values in its fields.


def plain(sample: Sample) -> Sample:
    """A copy with lists where there were arrays and tensors, and text where there were numbers as labels and ids.

    Images become the bytes of PNG files; what is given to a model beside its tokens stays arrays and tensors.
    """
    values = {f.name: getattr(sample, f.name) for f in fields(Sample)}
    given = {name: convert(values[name]) for name, convert in _PLAIN.items() if values[name] is not None}
    return Sample(**values | given)


def _listed(values: Any) -> Any:
    if isinstance(values, list) and all(type(value) is int or type(value) is float for value in values):
        return values
    if isinstance(values, list | tuple):
        return [value.item() if hasattr(value, "item") else value for value in values]
    return values.tolist() if hasattr(values, "tolist") else values


def _plain_mask(values: Any) -> Any:
    """0 and 1 as integers, however they were written; what is neither stays, and is refused."""
    listed = _listed(values)
    if not isinstance(listed, list):
        return listed
    return [int(v) if isinstance(v, bool | int | float) and v in (0, 1) else v for v in listed]


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float | np.generic) else value


def _texts(values: Any) -> Any:
    return [_text(value) for value in values] if isinstance(values, list | tuple) else values


def _media(inputs: Any) -> Any:
    """Lists of files for lists of images, by their kind; None where there are none."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {kind: _files(media) for kind, media in inputs.items() if media is not None} or None


def _files(media: Any) -> Any:
    if isinstance(media, list | tuple):
        return [_file(each) for each in media]
    return [_file(media)] if hasattr(media, "save") or isinstance(media, bytes) else media


def _file(image: Any) -> Any:
    """An image of Pillow as PNG; others as they are."""
    if not hasattr(image, "save"):
        return image
    content = io.BytesIO()
    (image if image.mode in _PNG_MODES else image.convert("RGB")).save(content, "PNG")
    return content.getvalue()


def _given(inputs: Any) -> Any:
    """A dict of a mapping, such as a processor answers, without what is None."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {name: values for name, values in inputs.items() if values is not None} or None


_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")

_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "tokens": _listed,
    "loss_mask": _plain_mask,
    "rollout_log_probs": _listed,
    "rollout_sampling_mask": lambda rows: [_listed(row) for row in rows],
    "teacher_log_probs": _listed,
    "label": label_as_given,
    "rollout_id": _text,
    "session_id": _text,
    "weight_versions": _texts,
    "multimodal_inputs": _media,
    "multimodal_train_inputs": _given,
}


# What a generate function has to set. A sample that lacks some of it would train nothing, without a warning.


_STATUS = (
    "status is still PENDING: set sample.status to Sample.Status.COMPLETED, TRUNCATED (a length limit ended it), "
    "ABORTED, or FAILED with failure_reason"
)
_RESPONSE = (
    "response_length is 0, and a response's text is never tokenized again: ask the engine with return_logprob, append "
    "the token ids of its answer to sample.tokens behind the prompt's, and set response_length, rollout_log_probs and, "
    "where there are tokens that the policy did not write, loss_mask; or set remove_sample"
)
_PROMPT = "all of tokens are the response: sample.tokens begin with the prompt's token ids"


def require_finished(path: str, sample: Sample) -> None:
    """Raises InvalidArgument, with reason HOOK_INCOMPLETE, for one that cannot be trained as it is."""
    if sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED):
        return
    missing = []
    if sample.status is Sample.Status.PENDING:
        missing.append(_STATUS)
    if not sample.response_length and not sample.remove_sample:
        missing.append(_RESPONSE)
    if sample.response_length and len(sample.tokens) == sample.response_length and sample.prompt:
        missing.append(_PROMPT)
    if missing:
        raise InvalidArgument(
            f"hook {path} returned a sample that cannot be trained: {'; '.join(missing)}", reason="HOOK_INCOMPLETE"
        )
