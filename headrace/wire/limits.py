"""The limits of the protocol, each with its name. docs/protocol.md shows them; a test compares the two.

A peer that exceeds one is refused with INVALID_ARGUMENT (or RESOURCE_EXHAUSTED where others hold what it needs), and
nothing of its call is kept.
"""

from __future__ import annotations

from typing import Final

# Text

MAX_ID_CHARACTERS: Final = 512
"""Ids of prompts, samples, groups, leases, producers and requests."""
MAX_NAME_CHARACTERS: Final = 128
"""Names of streams, columns, tags, scorers and reward parts; reasons for programs; keys of a prompt file."""
MAX_TEXT_CHARACTERS: Final = 2_048
"""Messages for people; longer ones are cut."""
MAX_PATH_CHARACTERS: Final = 4_096
"""Paths of files."""
MAX_JSON_BYTES: Final = 1 << 20
"""One metadata_json, tools_json or extra_json."""
MAX_JSON_DEPTH: Final = 64
"""Objects and arrays inside of each other."""

# Numbers

MAX_COUNTER: Final = 1 << 53
"""Steps, epochs, policy versions, positions and byte counts: what a JSON number holds exactly."""
MAX_STEPS_AHEAD: Final = 1_000_000
"""A rewind or a policy version may be so far ahead of what the ledger knows: one that was restored is behind."""
MAX_WAIT_SECONDS: Final = 86_400.0
"""Longer waits are cut to it, and to the deadline of the call."""
MAX_LEASE_SECONDS: Final = 30 * 86_400.0
"""A lease unless it is renewed."""

LAST_PORT: Final = 65_535
"""TCP's last one."""

# One peer: an address, or the name in a certificate or of a token

MAX_CONNECTIONS_PER_PEER: Final = 2_048
"""Connections of one address to one port; of those that asked nothing yet, the oldest ones are closed."""
MAX_CONNECTIONS: Final = 8_192
"""The same of all addresses."""
MAX_SILENT_CONNECTIONS_PER_PEER: Final = 256
"""Connections of one address that have sent no whole request yet, over HTTP; the oldest ones are closed."""
MAX_HANDSHAKE_SECONDS: Final = 10.0
"""The time from a connection's start to the end of its TLS handshake and HTTP/2 preface."""
MAX_IDLE_SECONDS: Final = 600.0
"""A gRPC connection without a call is closed; clients open another."""
MAX_RECEIVING_PER_PEER: Final = 16
"""Requests of one peer that are on their way at the same time; further ones wait, unread."""
MAX_RECEIVE_SECONDS: Final = 300.0
"""The time from the start of a gRPC call to the end of its request."""
MAX_BYTES_PER_PEER: Final = 2 << 30
"""Requests of one peer that are being answered; the run's own services have no such limit."""
MAX_METADATA_BYTES: Final = 16_384
"""Metadata of a gRPC call."""
MAX_STREAMS_PER_CONNECTION: Final = 8_192
"""Calls on one gRPC connection at once, those included that were reset and are not cleared away yet.

A client waits with further ones; in a burst some get UNAVAILABLE and may ask again."""
MAX_HTTP_HEADER_BYTES: Final = 32_768
"""The head of an HTTP request: its first line and all headers."""
MAX_HTTP_HEADER_SECONDS: Final = 10.0
"""The time from a connection's start, or its last answer, to the end of the head."""
MAX_HTTP_BODY_BYTES: Final = 16 << 20
"""The body of an HTTP request."""
MAX_SMALL_HTTP_CHUNKS: Final = 1_024
"""Chunks of fewer bytes than `SMALL_HTTP_CHUNK_BYTES` in the body of a request to the OpenAI endpoint."""
SMALL_HTTP_CHUNK_BYTES: Final = 64
"""What a chunk has at least that does not count as small."""
MAX_HTTP_BODY_SECONDS: Final = 60.0
"""The time from the head to the end of the body."""
MAX_HTTP_STALL_SECONDS: Final = 60.0
"""A client that does not read its answer."""

# One message

MAX_MESSAGE_BYTES: Final = 256 << 20
"""What gRPC takes at all, either way; each kind of request has its own limit below it."""
MAX_REQUEST_BYTES: Final = 16 << 20
"""A request that is not named below."""
MAX_SUBMIT_REQUEST_BYTES: Final = 32 << 20
"""A SubmitPrompts request."""
MAX_RELEASE_REQUEST_BYTES: Final = 64 << 20
"""A ReleaseLeases request."""
MAX_PUT_REQUEST_BYTES: Final = 256 << 20
"""A PutGroups request."""
MAX_SCORE_REQUEST_BYTES: Final = 64 << 20
"""A Score request."""
MAX_FIELDS: Final = 200_000
"""Fields of a request, those of nested messages included; each entry of a repeated one is one."""
MAX_PUBLISH_FIELDS: Final = 600_000
"""The same of a BeginPublish or CommitPublish."""
MAX_ANSWER_BYTES: Final = 3 << 20
"""Answers are filled up to here, below the 4 MiB that gRPC takes by default; a larger item comes alone."""
MAX_BATCH_ANSWER_BYTES: Final = 32 << 20
"""The same for the envelopes of a LeaseBatch."""
MAX_ERROR_BYTES: Final = 2_048
"""The message of an error, as it is encoded in a header; longer ones are cut."""

# One call of the buffer

MAX_GROUPS_PER_LEASE: Final = 1_000
"""LeaseGroups; more are cut to it."""
MAX_LEASES_PER_CALL: Final = 10_000
"""RenewLeases."""
MAX_RELEASES_PER_CALL: Final = 2_048
"""ReleaseLeases."""
MAX_PROMPTS_PER_CALL: Final = 10_000
"""SubmitPrompts."""
MAX_PUTS_PER_CALL: Final = 1_000
"""PutGroups."""
MAX_PUT_SAMPLES_PER_CALL: Final = 1_024
"""Samples of all groups of a PutGroups, or of all leases of a ReleaseLeases."""
MAX_SAMPLES_PER_FETCH: Final = 65_536
"""FetchSamples."""
MAX_RETRIES_PER_CALL: Final = 4_096
"""RetryGroups."""
MAX_DROPS_PER_CALL: Final = 1_024
"""DropGroups."""
MAX_PAGE_SIZE: Final = 1_000
"""ListGroups; larger ones are cut to it."""
MAX_STATES: Final = 16
"""States to choose from in ListGroups."""

# One call of the rollout service

MAX_PROMPT_TOKENS: Final = 1 << 20
"""Token ids of a prompt."""
MAX_NEW_TOKENS: Final = 1 << 20
"""max_new_tokens."""
MAX_STOPS: Final = 1_024
"""Stop strings, and stop token ids."""
MAX_TEMPERATURE: Final = 1e6
"""temperature."""
MAX_SCHEMA_BYTES: Final = 32 << 10
"""json_schema of sampling parameters."""
MAX_SCHEMA_DEPTH: Final = 32
"""Objects and arrays inside of each other in a json_schema."""
MAX_REGEX_BYTES: Final = 4 << 10
"""regex of sampling parameters."""
MAX_RESPONSES: Final = 128
"""`n` of Generate."""
MAX_EVAL_DATASETS: Final = 256
"""Evaluate."""
MAX_EVAL_FILE_BYTES: Final = 256 << 20
"""A prompt file to evaluate on."""
MAX_EVAL_PROMPTS: Final = 1 << 20
"""Prompts of a data set to evaluate on."""
MAX_EVAL_SAMPLES: Final = 1 << 20
"""Samples of an evaluation."""
MAX_EVALUATIONS: Final = 8
"""Evaluations at the same time."""
MAX_TENSORS: Final = 100_000
"""Tensors of a manifest, and checksums of a commit."""
MAX_BUCKETS: Final = 1 << 16
"""Buckets of a publication."""
MAX_PUBLISH_GROUPS: Final = 1_024
"""Collective groups of a publication."""
MAX_PUBLISH_SECONDS: Final = 86_400.0
"""deadline_seconds of a publication."""
MAX_DRAIN_SECONDS: Final = 86_400.0
"""drain_seconds of ScaleFleet."""
MAX_ENGINES: Final = 65_536
"""engine_ids."""
MAX_PROBE_TOKENS: Final = 4_096
"""Tokens that engines are asked about at a commit."""
MAX_TASKS_PER_CALL: Final = 1_024
"""Tasks of a LeaseTasks; more are cut to it."""
MAX_TASK_WAIT_SECONDS: Final = 60.0
"""wait_seconds of LeaseTasks; longer waits are cut to it."""

# What is stored

MAX_PROMPT_BYTES: Final = 8 << 20
"""A prompt, metadata and tools included."""
MAX_PROMPT_LINE_BYTES: Final = 16 << 20
"""A line of a prompt file."""
MAX_TABLE_BYTES: Final = 1 << 30
"""A prompt file that is one JSON array, or CSV."""
MAX_MESSAGES: Final = 4_096
"""Chat messages of a prompt; and tool calls in all messages of one request."""
MAX_TOOLS: Final = 1_024
"""The tools that a request to the OpenAI endpoint offers."""
MAX_FILE_ROWS: Final = 20_000_000
"""Rows of a prompt file that is not streamed."""
MAX_ENVELOPE_BYTES: Final = 64 << 10
"""A sample's envelope."""
MAX_PAYLOAD_BYTES: Final = 64 << 20
"""A sample's payload; larger columns come out of line."""
MAX_GROUP_ENVELOPE_BYTES: Final = 16 << 20
"""The envelopes of a group, and those of all groups of a PutGroups."""
MAX_PARTIAL_BYTES: Final = 64 << 20
"""Envelopes and payloads of the partial samples of a group."""
MAX_TAGS: Final = 64
"""Tags of a sample, and named parts of its reward."""
MAX_TAG_CHARACTERS: Final = 2_048
"""The value of a tag."""
MAX_POLICY_RANGES: Final = 4_096
"""Policy ranges of a sample."""
MAX_COLUMNS: Final = 64
"""Columns of a sample, in its payload or out of line."""
MAX_COLUMN_RANK: Final = 8
"""Dimensions of a column."""
MAX_COLUMN_BYTES: Final = 1 << 40
"""A column; the product of its shape, too."""
MAX_UPLOAD_BYTES: Final = 8 << 20
"""The bytes in one UploadColumn."""
MAX_UPLOADS: Final = 1_000
"""Columns whose upload has begun and not ended."""

# Streams

MAX_STREAMS: Final = 256
"""Streams of a ledger."""
MAX_STREAM_NAMES: Final = 4_096
"""Names of streams that a ledger has ever had, those of deleted ones included."""
MAX_SAMPLES_PER_GROUP: Final = 1_024
"""n_samples_per_prompt, the samples of a group that fanned out, and its partial samples."""
MAX_SAMPLES_PER_STEP: Final = 65_536
"""groups_per_step x n_samples_per_prompt; a group may fan out to its even share of them."""
MAX_GROUPS_PER_STEP: Final = 2_048
"""groups_per_step and over_sampling_groups, of one shard."""
MAX_STALENESS: Final = 1_000_000
"""max_staleness and retain_steps."""
MAX_ATTEMPTS: Final = 1_000
"""max_attempts."""
MAX_GROUPS: Final = 1 << 31
"""max_groups, max_queued_groups and max_leases."""
MAX_SHARDS: Final = 1_024
"""num_shards."""
MAX_ROLLOUT_SERVICES: Final = 256
"""Rollout services on one ledger."""
MAX_FILES: Final = 64
"""Prompt files of a stream."""
MAX_FILE_WORKERS: Final = 64
"""num_workers of a prompt file."""
MAX_FILE_WEIGHT: Final = 1e6
"""The weight of a prompt file; the smallest is its inverse."""
MAX_STREAM_CONFIG_BYTES: Final = 64 << 10
"""A stream's config."""

# Scoring

MAX_SCORE_ITEMS_PER_CALL: Final = 4_096
"""Score."""
MAX_SCORE_ITEMS_PER_CALLER: Final = 8_192
"""Items of one connection that are being scored or wait for it."""
MAX_SCORE_ITEMS: Final = 16_384
"""Items of all callers that are being scored or wait for it."""
MAX_SCORER_SECONDS: Final = 30.0
"""One item in a scorer of headrace's own, unless reward_timeout_seconds is less; a custom function has that alone."""
MAX_MATH_CPU_SECONDS: Final = 2.0
"""Processor time of one item in scorers of mathematics and in reasoning_gym: an answer that takes longer is wrong."""
MAX_REGEX_SECONDS: Final = 5.0
"""One item in scorer regex: patterns come with the items, and some never come to an end."""
MAX_CODE_SECONDS: Final = 600.0
"""One item in scorer code, unless reward_timeout_seconds is less: a program may have many tests."""
MAX_REMOTE_SECONDS: Final = 600.0
"""One item in scorers remote_rm and judge, unless reward_timeout_seconds is less."""
MAX_HOOK_ANSWER_BYTES: Final = 256 << 20
"""What one call of a user's function returns."""
