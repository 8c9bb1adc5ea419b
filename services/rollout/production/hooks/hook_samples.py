"""Samples between the service and a user's function: as the function sees them, and as they are stored.

What comes back is checked like any peer's message. A sample that cannot be used is a failure of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.digits import whole_number
from headrace.errors import HeadraceError, InvalidArgument, Unavailable
from headrace.hooks import HookArgs, from_hook, to_hook
from headrace.hooks import Sample as HookSample
from headrace.hooks.finished import require_finished
from headrace.images.columns import processed_of, raw_of
from headrace.prompts.label import label_for_hooks
from headrace.rpc.log import log
from headrace.sample_log import ASKED
from headrace.trajectory import Failure, Sample, Status
from headrace.wire.limits import MAX_COUNTER, MAX_ID_CHARACTERS
from services.rollout.engine.weights import ServedWeights
from services.rollout.production.prompts import PromptEncoder
from services.rollout.production.sampling import SampleRequest, failed_sample

_SHOWN_CHARACTERS = 300


class WeightsRefused(Unavailable):
    """The samples must not be stored; they are generated again."""


def sample_for_hook(request: SampleRequest, args: HookArgs) -> HookSample:
    """Gives the function a row's messages as they are, unless the job applies the chat template to prompts."""
    if request.begun:
        return to_hook(request.begun)
    prompt, metadata, fields = request.prompt, dict(request.metadata), request.hook_fields
    if prompt.tools:
        metadata.setdefault("tools", prompt.tools)
    columns = prompt.images.columns if prompt.images else {}
    as_text = prompt.messages is None or args.get("apply_chat_template")
    return HookSample(
        group_index=zlib.crc32(request.group_id.encode()),  # the same for all samples of a group, after a restart too
        index=request.index,
        session_id=fields.get("session_id", request.sample_id),
        prompt=prompt.text if as_text else [dict(message) for message in prompt.messages or ()],
        multimodal_inputs=raw_of(columns),
        multimodal_train_inputs=processed_of(columns),
        label=label_for_hooks(request.label, fields),
        metadata=metadata,
        generate_function_path=fields.get("generate_function_path"),
        custom_rm_path=fields.get("custom_rm_path"),
    )


class HookSamples:
    """Converts the samples of the function at `path`."""

    def __init__(
        self,
        path: str,
        args: HookArgs,
        weights: ServedWeights,
        warn: Callable[[str], None] = lambda _: None,
        encoder: PromptEncoder | None = None,
    ) -> None:
        """With an `encoder`, samples show the text that the model was asked where it is another than the prompt's."""
        self._encoder = encoder
        self._templates_twice = False
        self._path = path
        self._args = args
        self._weights = weights
        self._warn = warn
        self._warned = False

    def given(self, request: SampleRequest) -> HookSample:
        """The request's sample as the function is given it."""
        return sample_for_hook(request, self._args)

    async def of_one(self, request: SampleRequest, made: Sequence[HookSample], oldest: int) -> list[Sample]:
        """Returns the samples of one request; an unusable one is that request's failure."""
        try:
            return await self._from_hooks(request, made, oldest)
        except WeightsRefused:
            raise
        except HeadraceError as error:
            failure = Failure(error.reason, error.message)
        except Exception as error:  # noqa: BLE001  # what a user's function returned may be anything
            message = f"what hook {self._path} returned cannot be used: {type(error).__name__}: {error}"
            failure = Failure("HOOK_INVALID", message)
        log.warning("hook_failed", hook=self._path, sample_id=request.sample_id, message=failure.message)
        return [failed_sample(request, failure)]

    async def _from_hooks(self, request: SampleRequest, made: Sequence[HookSample], oldest: int) -> list[Sample]:
        """Gives one sample the request's id; those of a fan-out are numbered and share it as their rollout."""
        if len(made) != 1:
            for sample in made:
                sample.rollout_id = request.sample_id
        for sample in made:
            require_finished(self._path, sample)
            self._warn_without_versions(sample)
            sample.weight_versions = [await self._version(name) for name in sample.weight_versions] or [str(oldest)]
        made_samples = [
            self._with_reward(
                from_hook(
                    sample,
                    sample_id=request.sample_id if len(made) == 1 else f"{request.sample_id}/{number}",
                    group_id=request.group_id,
                    index=request.index,
                    rendered_prompt=request.prompt.text,
                    sampling_params=request.params.for_engine(),
                ),
                sample,
            )
            for number, sample in enumerate(made)
        ]
        if self._encoder is None or request.prompt.images is not None:
            return made_samples
        return [await self._encoder.off_loop(self._with_asked, request, sample) for sample in made_samples]

    def _with_asked(self, request: SampleRequest, sample: Sample) -> Sample:
        """Notes the text of the prompt's tokens where the function has made another one."""
        assert self._encoder is not None
        if not sample.response_length:
            return sample
        asked = self._encoder.decode_exactly(sample.tokens[: sample.prompt_length].tolist())
        if asked == request.prompt.text:
            return sample
        if self._args.get("apply_chat_template") and self._is_templated_twice(request.prompt.text, asked):
            self._warn_of_two_templates(asked)
        return replace(sample, hook_fields={**sample.hook_fields, ASKED: asked})

    def _is_templated_twice(self, text: str, asked: str) -> bool:
        assert self._encoder is not None
        for shown in (text, text.strip()):  # some templates cut blanks off
            if shown and shown in asked:
                turn = self._encoder.render([{"role": "user", "content": shown}], None)
                if shown + turn.rpartition(shown)[2] in asked:
                    return True
        return False

    def _warn_of_two_templates(self, asked: str) -> None:
        if self._templates_twice:
            return
        self._templates_twice = True
        shown = asked if len(asked) <= _SHOWN_CHARACTERS else f"{asked[:_SHOWN_CHARACTERS]}…"
        self._warn(
            f"hook {self._path} makes messages of sample.prompt, which --apply-chat-template has rendered already: the "
            f"model is asked {shown!r}. Leave --apply-chat-template out, or pass sample.prompt to generate_single "
            "as it is"
        )

    def _warn_without_versions(self, sample: HookSample) -> None:
        """Warns once about a function whose samples do not name their weights."""
        if self._warned or sample.weight_versions or not sample.response_length:
            return
        self._warned = True
        self._warn(
            f"hook {self._path} leaves weight_versions empty, so which weights made a sample is not known: the version "
            "that was served when the function was called counts for all of it, and staleness is at most what is "
            "shown. To have it measured, append each answer's meta_info['weight_version'] to sample.weight_versions"
        )

    def _with_reward(self, sample: Sample, made: HookSample) -> Sample:
        """Takes a reward that the function has set; no scorer is asked then."""
        if made.reward is None or sample.status not in (Status.COMPLETED, Status.TRUNCATED):
            return sample
        parts = made.reward if isinstance(made.reward, dict) else {}
        scorer = f"hook {self._path}"[-MAX_ID_CHARACTERS:]
        return replace(sample, reward=made.get_reward_value(self._args), reward_parts=parts, scorer=scorer)

    async def _version(self, name: object) -> str:
        """Returns the policy version behind a name that an engine gave, or behind a version's own number."""
        if isinstance(name, str) and (number := whole_number(name, MAX_COUNTER)) is not None:
            if number > self._weights.policy_version:
                raise InvalidArgument(f"weight_versions hold {name}, {self._weights.policy_version} is served")
            return name
        version = await self._weights.version_of(name) if isinstance(name, str) else None
        if version is None:
            raise WeightsRefused(f"weight_versions hold {name!r:.80}, which is of refused weights")
        return str(version)
