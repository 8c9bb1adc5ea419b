"""Supervised fine-tuning: conversations from the prompts become samples without an engine and without a scorer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.api.sample.v1 import sample_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.job.schema.training import TrainSection
from headrace.trajectory import Sample, Status
from services.rollout.chat.mask import ChatMask
from services.rollout.production.prompts import EncodedPrompt, PromptEncoder, messages_of
from services.rollout.production.sampling import SampleRequest


@dataclass(frozen=True, slots=True)
class SupervisedParts:
    """The parts that take the place of engine and scorer."""

    encoder: ConversationEncoder
    sampler: SupervisedSampler


def supervised_parts(
    config: TrainSection,
    hf_checkpoint: Path,
    variables: Mapping[str, Any] = MappingProxyType({}),
    *,
    trust_remote_code: bool = False,
) -> SupervisedParts | None:
    """Returns None unless the job has --loss-mask-type."""
    family = config.loss_mask_type
    if family is None:
        return None
    encoder = ConversationEncoder(
        hf_checkpoint,
        family,
        keep_earlier_thoughts=config.keep_earlier_thoughts,
        variables=variables,
        trust_remote_code=trust_remote_code,
    )
    return SupervisedParts(encoder, SupervisedSampler())


class ConversationEncoder(PromptEncoder):
    """Encodes whole conversations; `load` raises ConfigError when the tokenizer is not of the family."""

    def __init__(
        self,
        hf_checkpoint: Path,
        family: str,
        *,
        keep_earlier_thoughts: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(
            hf_checkpoint, apply_chat_template=False, variables=variables, trust_remote_code=trust_remote_code
        )
        self._family = family
        self._keep_earlier_thoughts = keep_earlier_thoughts

    def load(self) -> None:
        super().load()
        _ = self._mask

    @cached_property
    def _mask(self) -> ChatMask:
        return ChatMask(
            self.tokenizer,
            self._family,
            keep_earlier_thoughts=self._keep_earlier_thoughts,
            variables=self.variables,
        )

    def encode(self, prompt: pb.Prompt) -> EncodedPrompt:
        """Raises InvalidArgument for a prompt that is no conversation, or has nothing to train."""
        if prompt.WhichOneof("content") != "messages":
            raise InvalidArgument(
                f"prompt {prompt.prompt_id} is a text: supervised fine-tuning trains arrays of chat messages",
                field="prompt.content",
            )
        return self.encode_segments(self._mask.segments(*messages_of(prompt)))


class SupervisedSampler:
    """A `Sampler`: the response is what follows the first assistant's opening; only assistants' tokens are trained."""

    def __init__(self) -> None:
        self.in_flight = 0

    async def sample_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, return_partial: asyncio.Event | None = None
    ) -> list[Sample]:
        """Returns one sample for each request."""
        return [_made(request) for request in requests]


def _made(request: SampleRequest) -> Sample:
    mask = np.zeros(len(request.prompt.tokens))
    for trained in request.prompt.trained:
        mask[trained.start : trained.stop] = 1
    start = request.prompt.trained[0].start
    return request.sample(
        mask[start:], np.zeros(len(mask) - start), Status.COMPLETED, sampling_params={}, hook_fields={}
    )
