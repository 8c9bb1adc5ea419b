"""Supervised fine-tuning: conversations from the prompts become samples without an engine and without a judge."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.config.job import Job
from headrace.errors import HeadraceError
from headrace.trajectory import Failure, Sample, Status
from services.rollout.chat_mask import ChatMask
from services.rollout.prompts import PromptEncoder
from services.rollout.sampling import SampleRequest, failed_sample


@dataclass(frozen=True, slots=True)
class SupervisedParts:
    """What stands in for engine and judge."""

    encoder: PromptEncoder
    maker: SupervisedMaker


def supervised_parts(job: Job) -> SupervisedParts | None:
    """Those of a job with --loss-mask-type; None for one whose answers come from engines."""
    family = job.train.loss_mask_type
    if family is None:
        return None
    encoder = PromptEncoder(job.model.hf_checkpoint, apply_chat_template=False, answers_follow=False)
    return SupervisedParts(encoder, SupervisedMaker(ChatMask(encoder.tokenizer, family)))


class SupervisedMaker:
    """A `Maker`: the response is what follows the first assistant's opening; only assistants' tokens are trained."""

    def __init__(self, mask: ChatMask) -> None:
        self._mask = mask
        self.in_flight = 0

    async def make_all(
        self, requests: Sequence[SampleRequest], *, evaluation: bool, hand_back: asyncio.Event | None = None
    ) -> list[Sample]:
        """One sample for each request; a conversation without an assistant is FAILED."""
        return [self._made(request) for request in requests]

    def _made(self, request: SampleRequest) -> Sample:
        tokens = np.asarray(request.prompt.tokens, dtype=np.int32)
        try:
            mask = self._mask(request.prompt.tokens)
        except HeadraceError as error:
            return failed_sample(request, Failure(error.reason, error.message))
        response = len(tokens) - int(np.flatnonzero(mask)[0])
        return Sample(
            sample_id=request.sample_id,
            group_id=request.group_id,
            index=request.index,
            prompt=request.prompt.text,
            response="",
            tokens=tokens,
            loss_mask=mask[len(tokens) - response :],
            rollout_log_probs=np.zeros(response, dtype=np.float32),
            status=Status.COMPLETED,
            label=request.label,
            metadata=request.metadata,
        )
