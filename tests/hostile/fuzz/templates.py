"""Requests that make sense now: what a well-meant client would send next, from what the server has told.

A method without a template gets a message filled by the names of its fields: a new RPC is called from its first day.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from headrace.api.buffer.v1 import buffer_pb2 as buffer
from headrace.api.reward.v1 import reward_pb2 as reward
from headrace.api.rollout.v1 import rollout_pb2 as rollout
from headrace.api.sample.v1 import sample_pb2
from headrace.api.trainer.v1 import trainer_pb2 as trainer
from tests.hostile.wire import sample

_DEPTH = 24
_SAME = {
    "group_ids": "group_id",
    "renewed": "lease_id",
    "lost": "lease_id",
    "lease_ids": "lease_id",
    "sample_ids": "sample_id",
    "prompt_ids": "prompt_id",
    "engine_ids": "engine_id",
    "next_page_token": "page_token",
    "next_step": "step",
    "committed_step": "step",
    "position": "from_position",
}


class Memory:
    """Scalars by their field's name, messages by their type's name; the latest of each."""

    def __init__(self) -> None:
        self.values: defaultdict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=_DEPTH))
        self.messages: defaultdict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=_DEPTH))

    def learn(self, message: Message) -> None:
        """Everything that it holds, down to the leaves; the first few of what is repeated."""
        descriptor = message.DESCRIPTOR
        self.messages[descriptor.name].append(message)
        for field, value in message.ListFields():
            if field.message_type and field.message_type.GetOptions().map_entry:
                continue
            name = "stream" if (descriptor.name, field.name) == ("StreamConfig", "name") else key_of(field)
            for one in list(value)[:8] if field.is_repeated else [value]:
                if field.message_type:
                    self.learn(one)
                elif not isinstance(one, str | bytes) or len(one) < 2048:
                    self.values[name].append(one)


def key_of(field: FieldDescriptor) -> str:
    """Fields of one meaning have one name."""
    return _SAME.get(field.name, field.name)


NUM_STREAMS = 6
_COLUMN = b"column" * 5000


class Templates:
    """`make(method)`: a request of the method's type. `folder` has prompts.jsonl and whatever else may be named."""

    def __init__(self, random: Random, memory: Memory, folder: Path) -> None:
        self._random = random
        self._memory = memory
        self._folder = folder
        self._by_method: dict[str, Callable[[], Message]] = {
            "CreateStream": self._create_stream,
            "DeleteStream": self._delete_stream,
            "SubmitPrompts": self._submit,
            "LeaseGroups": self._lease,
            "PutGroups": self._put,
            "ReleaseLeases": self._release,
            "LeaseBatch": self._lease_batch,
            "ConsumeBatch": self._consume,
            "CommitStep": self._commit,
            "Rewind": self._rewind,
            "SetPolicyVersion": self._version,
            "UploadColumn": self._upload,
            "Score": self._score,
            "Generate": self._generate,
            "Evaluate": self._evaluate,
            "BeginPublish": self._begin,
            "CommitPublish": self._commit_publish,
            "SetReward": self._set_reward,
            "SaveCheckpoint": lambda: trainer.SaveCheckpointRequest(request_id=self._name("save")),
            "ExportModel": lambda: trainer.ExportModelRequest(path=str(self._folder / self._name("export"))),
        }

    def make(self, method: MethodDescriptor) -> Message:
        """A request that makes sense, as far as is known."""
        template = self._by_method.get(method.name)
        return template() if template else self._filled(method.input_type)

    def _filled(self, descriptor: Descriptor) -> Message:
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if field.message_type or self._random.random() < 0.3:
                continue
            known = self._memory.values[key_of(field)]
            if not known:
                continue
            value = self._random.choice(known)
            try:
                if field.is_repeated:
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)
            except (TypeError, ValueError):
                continue  # the same name with another type elsewhere
        return message

    def _name(self, kind: str) -> str:
        return f"{kind}-{self._random.randrange(10_000)}"

    def _known(self, kind: str) -> Any:
        """A message of this type that an answer held, or an empty one of None."""
        found = self._memory.messages[kind]
        return self._random.choice(found) if found else None

    def _stream(self) -> str:
        known = self._memory.values["stream"]
        return self._random.choice([*known, "train"]) if known else "train"

    def _create_stream(self) -> Message:
        chance = self._random
        config = buffer.StreamConfig(
            name=f"fuzz/{chance.randrange(NUM_STREAMS)}",
            n_samples_per_prompt=chance.choice((1, 2)),
            groups_per_step=chance.choice((1, 2)),
            max_staleness=chance.choice((0, 1, 5, None)),
            lease_seconds=chance.choice((0, 1, 60)),
            retain_steps=chance.choice((None, 0, 1)),
        )
        if chance.random() < 0.3:
            config.files.add(path=str(self._folder / "prompts.jsonl"), input_key="prompt", num_epochs=2)
        return buffer.CreateStreamRequest(config=config)

    def _delete_stream(self) -> Message:
        """One of them comes and goes, the others stay."""
        return buffer.DeleteStreamRequest(stream="fuzz/0", force=self._random.random() < 0.5)

    def _submit(self) -> Message:
        prompts = [
            sample_pb2.Prompt(prompt_id=self._name("p"), text="What is 1+1?", label="2", metadata_json='{"a": 1}')
            for _ in range(self._random.randrange(1, 5))
        ]
        return buffer.SubmitPromptsRequest(stream=self._stream(), prompts=prompts)

    def _lease(self) -> Message:
        return buffer.LeaseGroupsRequest(
            stream=self._stream(), producer_id="fuzz", request_id=self._name("r"), max_groups=4
        )

    def _put(self) -> Message:
        lease = self._known("GroupLease")
        if lease is None:
            return buffer.PutGroupsRequest()
        put = buffer.GroupPut(lease_id=lease.lease_id, group_id=lease.group_id, outcome=buffer.PUT_OUTCOME_COMPLETE)
        if self._random.random() < 0.15:
            put.outcome = self._random.choice((buffer.PUT_OUTCOME_DROPPED, buffer.PUT_OUTCOME_FAILED))
            put.failure.reason, put.failure.message = "FUZZ", "on purpose"
        else:
            put.samples.extend(
                sample(f"{lease.lease_id}/{i}", lease.group_id, i, lease.policy_version) for i in range(lease.n_samples)
            )
        return buffer.PutGroupsRequest(groups=[put])

    def _release(self) -> Message:
        lease = self._known("GroupLease")
        if lease is None:
            return buffer.ReleaseLeasesRequest()
        release = buffer.LeaseRelease(lease_id=lease.lease_id, reason="fuzz")
        if self._random.random() < 0.5:
            partial = sample(f"{lease.lease_id}/partial", lease.group_id, 0, lease.policy_version)
            partial.envelope.status = sample_pb2.SAMPLE_STATUS_ABORTED
            release.partial_samples.append(partial)
        return buffer.ReleaseLeasesRequest(releases=[release])

    def _stats(self) -> Any:
        return self._known("StreamStats") or buffer.StreamStats(stream="train", epoch=1)

    def _lease_batch(self) -> Message:
        stats = self._stats()
        return buffer.LeaseBatchRequest(stream=stats.stream, epoch=stats.epoch, step=stats.step)

    def _consume(self) -> Message:
        stats, batch = self._stats(), self._known("LeaseBatchResponse")
        digest = batch.digest if batch else b""
        return buffer.ConsumeBatchRequest(stream=stats.stream, epoch=stats.epoch, step=stats.step, digest=digest)

    def _commit(self) -> Message:
        stats = self._stats()
        return buffer.CommitStepRequest(stream=stats.stream, epoch=stats.epoch, step=stats.step)

    def _rewind(self) -> Message:
        stats = self._stats()
        step = self._random.choice((stats.step, stats.committed_step))
        return buffer.RewindRequest(stream=stats.stream, step=step, request_id=self._name("w"))

    def _version(self) -> Message:
        stats = self._stats()
        return buffer.SetPolicyVersionRequest(stream=stats.stream, epoch=stats.epoch, policy_version=stats.step)

    def _upload(self) -> Message:
        digest = hashlib.sha256(_COLUMN).digest()
        offset = self._random.choice((0, 0, 10_000))
        self._memory.values["sha256"].append(digest)
        return buffer.UploadColumnRequest(
            sha256=digest, num_bytes=len(_COLUMN), offset=offset, data=_COLUMN[offset : offset + 20_000]
        )

    def _score(self) -> Message:
        items = [
            reward.ScoreItem(
                item_id=str(i),
                prompt="3 + 4 =",
                response=self._random.choice(("7", "\\boxed{7}", "", "x" * 300)),
                label="7",
                metadata_json=self._random.choice(("", '{"rm_type": "math"}', '{"rm_type": "f1"}')),
                group_id="g",
                status="completed",
                response_tokens=1,
            )
            for i in range(self._random.randrange(1, 4))
        ]
        return reward.ScoreRequest(items=items)

    def _generate(self) -> Message:
        sampling = sample_pb2.SamplingParams(max_new_tokens=self._random.choice((1, 4)), temperature=1.0)
        return rollout.GenerateRequest(text="What is 1+1?", sampling=sampling, return_tokens=True)

    def _evaluate(self) -> Message:
        dataset = rollout.EvalDataset(
            name="e",
            path=str(self._folder / "prompts.jsonl"),
            n_samples_per_prompt=1,
            max_prompts=2,
            input_key="prompt",
            sampling=sample_pb2.SamplingParams(max_new_tokens=2),
        )
        return rollout.EvaluateRequest(evaluation_id=self._name("e"), datasets=[dataset])

    def _begin(self) -> Message:
        fleet = self._known("GetFleetResponse")
        manifest = rollout.Manifest(total_bytes=12)
        for bucket, name in enumerate(("a", "b", "c")):
            manifest.tensors.add(name=name, shape=[1], dtype="float32", bucket=bucket)
        group = rollout.PublishGroup(name="g", master_address="127.0.0.1", master_port=29_500, buckets=[0, 1, 2])
        request = rollout.BeginPublishRequest(
            publication_id=self._name("publish"),
            policy_version=(fleet.policy_version if fleet else 0) + 1,
            manifest=manifest,
            groups=[group],
            backend="gloo",
            deadline_seconds=self._random.choice((0.2, 1.0, 3.0)),
            epoch=1,
        )
        self._memory.values["publication_id"].append(request.publication_id)
        return request

    def _commit_publish(self) -> Message:
        known = self._memory.values["publication_id"]
        request = rollout.CommitPublishRequest(publication_id=known[-1] if known else "p")
        if self._random.random() < 0.3:
            request.probe.tokens.CopyFrom(_column("tokens", sample_pb2.DTYPE_INT32, bytes(8), 2))
            request.probe.log_probs.CopyFrom(_column("log_probs", sample_pb2.DTYPE_FLOAT32, bytes(4), 1))
            request.probe.max_mean_difference = 0.5
        return request

    def _set_reward(self) -> Message:
        fleet = self._known("GetFleetResponse")
        return rollout.SetRewardRequest(address=fleet.reward_address if fleet else "127.0.0.1:1")


def _column(name: str, dtype: sample_pb2.Dtype.ValueType, data: bytes, length: int) -> sample_pb2.Column:
    return sample_pb2.Column(name=name, dtype=dtype, shape=[length], data=data)


def is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)
