"""The scorers of a service, which of them scores an item, and how a worker calls it.

Modules of scorers are imported in workers only, when they are needed.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from headrace.client.reward import RewardClient
from headrace.errors import ConfigError, InvalidArgument, NotFound
from headrace.hooks import HookArgs, NoReward, Reward, RewardForm, RewardHook, Sample, prepare_reward, run_reward
from headrace.hooks.load import load_hook
from headrace.limits import (
    MAX_CODE_SECONDS,
    MAX_JSON_BYTES,
    MAX_MATH_CPU_SECONDS,
    MAX_REGEX_SECONDS,
    MAX_REMOTE_SECONDS,
    MAX_SCORER_SECONDS,
    from_json,
    nearest,
    require_bytes,
    shown,
    syntax_tree,
    to_json,
)
from headrace.process.workers import WorkerPool
from headrace.prompts import label_for_hooks
from headrace.rpc.net import Address
from headrace.score import CUSTOM_RM_PATH, ScoreError, ScoreItem
from headrace.trajectory import LOSS_MASK, ROLLOUT_LOG_PROBS, TOKENS
from services.reward.composition import Combine, Part

# Limits the processor time of a call, which a busy machine does not use up.
# Python code is ended by an exception; a process that is busy in C (a power of huge integers) is killed by the kernel a
# moment later: its pool sees it die of `KILLED_BY`.

KILLED_BY = signal.SIGPROF
_GRACE_SECONDS = 0.5
_AGAIN_SECONDS = 0.05  # a library's bare `except:` may swallow the first


class TooSlow(BaseException):
    """The time is used up. It is no Exception, because libraries catch those."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises TooSlow inside, or at the end where a library caught it. Use it in the main thread of a worker."""
    is_used_up = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_used_up
        is_used_up = True
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds + _GRACE_SECONDS)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGVTALRM, before)
    if is_used_up:  # its result is of a calculation that was cut short
        raise TooSlow


BOXED = "boxed_"
"""The prefix of a scorer's name with which only the content of the response's last box is scored."""
_SLOW_NICENESS = 5


@dataclass(frozen=True, slots=True)
class Builtin:
    """A file in scorers/. With a `package`, the package's version is in the scorer's. `max_seconds` limits one item.

    One that `waits` has a coroutine as its `score`. One that asks a `remote` server, or that `takes_args`, is given the
    job's options. `target` is module:function in scorers/, where that is not NAME:score. An answer that takes more than
    `cpu_seconds` of processor time, where that is set, is `wrong`. Of a reward in parts the `part` counts, unless
    --reward-key names another. A `cached` one is asked once about equal items. One that `is_quick` takes
    microseconds for any text and runs in the service itself. The package is in the `extra` of headrace.
    """

    name: str
    description: str
    package: str | None = None
    extra: str = "reward"
    max_seconds: float = MAX_SCORER_SECONDS
    cpu_seconds: float | None = None
    waits: bool = False
    cached: bool = False
    takes_args: bool = False
    target: str | None = None
    remote: bool = False
    wrong: Reward = 0.0
    part: str | None = None
    is_quick: bool = False

    @property
    def module(self) -> str:
        """Its file in scorers/."""
        return (self.target or self.name).partition(":")[0]


BUILTINS: Sequence[Builtin] = (
    Builtin(
        "code",
        "1 when the response's last block of Python passes the task's tests, in a sandbox.",
        max_seconds=MAX_CODE_SECONDS,
        waits=True,
    ),
    Builtin(
        *("dapo", "1 when what follows the last `Answer:` equals the label, as math compares; else -1.", "math-verify"),
        cpu_seconds=MAX_MATH_CPU_SECONDS,
        wrong={"score": -1.0, "acc": 0.0},
        part="score",
    ),
    Builtin(
        "deepscaler",
        "math, but only a boxed answer after </think> counts.",
        "math-verify",
        cpu_seconds=MAX_MATH_CPU_SECONDS,
    ),
    Builtin("exact_match", "1 when the response without surrounding blanks is the label.", is_quick=True),
    Builtin("f1", "The overlap of words with the label, as F1 from 0 to 1."),
    Builtin("gpqa", "1 when the answer is the right letter of several choices, or that choice's text."),
    Builtin(
        *("ifbench", "1 when the response follows all instructions of a row of IFBench.", "if-verifiable", "ifbench"),
        part="score",
    ),
    Builtin("json_schema", "1 when the response is JSON of the schema metadata.schema.", "jsonschema", "json-schema"),
    Builtin(
        "judge",
        "A language model's grade, from 0 to 1: --judge-url.",
        max_seconds=MAX_REMOTE_SECONDS,
        waits=True,
        remote=True,
        cached=True,
    ),
    Builtin(
        "length",
        "The response's tokens as a share of metadata.max_tokens, below 0.",
        takes_args=True,
        target="penalties:score_length",
    ),
    Builtin(
        *("math", "1 when the boxed or last answer equals the label, by math-verify.", "math-verify"),
        cpu_seconds=MAX_MATH_CPU_SECONDS,
    ),
    Builtin(
        *("nemo_gym", "The reward of the NeMo Gym resource server at --rm-url, from 0 to 1 in most."),
        max_seconds=MAX_REMOTE_SECONDS,
        waits=True,
        remote=True,
        part="reward",
    ),
    Builtin(
        "overlong",
        "DAPO's penalty for the last metadata.buffer_tokens before metadata.max_tokens, from 0 to -1.",
        takes_args=True,
        target="penalties:score_overlong",
    ),
    Builtin("random", "1 or 0 by chance.", is_quick=True),
    Builtin(
        *("reasoning_gym", "A reasoning_gym task's own score of the answer.", "reasoning-gym"),
        cpu_seconds=MAX_MATH_CPU_SECONDS,
    ),
    Builtin("regex", "1 when metadata.pattern, or the label, is found in the response.", max_seconds=MAX_REGEX_SECONDS),
    Builtin(
        "remote_rm",
        "What the server at --rm-url answers.",
        max_seconds=MAX_REMOTE_SECONDS,
        waits=True,
        remote=True,
    ),
    Builtin(
        "repetition",
        "The share of runs of metadata.ngram words that were there before, below 0.",
        takes_args=True,
        target="penalties:score_repetition",
    ),
)


def installed() -> dict[str, str]:
    """Returns name → version of the scorers whose packages are installed: the package's, and a digest of our code."""
    versions = {}
    for builtin in BUILTINS:
        if builtin.package is None:
            versions[builtin.name] = f"headrace {code_digest(builtin.module)}"
        elif importlib.util.find_spec(builtin.package.replace("-", "_")):
            version = importlib.metadata.version(builtin.package)
            versions[builtin.name] = f"{builtin.package} {version} {code_digest(builtin.module)}"
    return versions


_SCORERS = "services.reward.scorers"


@cache
def code_digest(module: str) -> str:
    """The digest of a scorer's file and of the files beside it that it imports."""
    folder, waiting, texts = Path(__file__).parent / "scorers", [module], dict[str, bytes]()
    while waiting:
        name = waiting.pop()
        if name in texts or not (file := folder / f"{name}.py").is_file():
            continue
        texts[name] = file.read_bytes()
        for node in ast.walk(syntax_tree(texts[name])):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_SCORERS):
                inner = (node.module or "").removeprefix(_SCORERS).lstrip(".")
                waiting += [inner] if inner else [each.name for each in node.names]
    return f"sha256:{hashlib.sha256(b''.join(texts[name] for name in sorted(texts))).hexdigest()[:12]}"


_BY_NAME = {each.name: each for each in BUILTINS}


@cache
def _function(name: str) -> Callable[..., Any]:
    builtin = _BY_NAME[name]
    module = importlib.import_module(f"{_SCORERS}.{builtin.module}")
    found: Callable[..., Any] = getattr(module, (builtin.target or "").partition(":")[2] or "score")
    return found


def run_builtin(name: str, item: ScoreItem, *args: HookArgs) -> Reward:
    """Scores an item. Runs in a worker; `name` is one of `BUILTINS`."""
    value: Reward = _function(name)(item, *args)
    return value


async def run_waiting_builtin(name: str, item: ScoreItem, *args: HookArgs) -> Reward | None:
    """The same for a scorer that waits for processes of its own, or for a server that the job's options name."""
    value: Reward | None = await _function(name)(item, *args)
    return value


def run_builtin_within(name: str, item: ScoreItem, cpu_seconds: float) -> Reward | None:
    """Scores an item, or returns None when that takes more than `cpu_seconds` of processor time."""
    _function(name)  # takes seconds, once, and is not the answer's fault
    try:
        with cpu_limit(cpu_seconds):
            return run_builtin(name, item)
    except TooSlow:
        return None


def prepare_slow(builtins: Sequence[str]) -> None:
    """Prepares a worker for scorers of headrace's, at a low priority for the processors."""
    os.nice(_SLOW_NICENESS)
    prepare(builtins, (), None)


def prepare(builtins: Sequence[str], hooks: Sequence[tuple[str, RewardForm]], model_path: str | None) -> None:
    """Imports what these scorers need. The warning of one about timeouts is silenced: the pool has its own."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for name in builtins:
        _function(name)
    for path, form in hooks:
        prepare_reward(path, form, model_path)


# The scorers of a service, and which of them scores an item.
# A function that an item names itself (a data source's `custom_rm_path`) scores it. A function that the job's
# eval_config names scores the items whose `metadata.rm_type` is its path. A custom function, where one is configured,
# scores every other item unless the request names another scorer: such functions tell rm_types apart themselves.
# So do a reward of several parts, and a scorer that was set while the service runs.
# Otherwise the item's `metadata.rm_type` decides, then the request's scorer, then the default.

CUSTOM = "custom"
COMPOSED = "composed"
"""The name of a reward of several parts."""
REMOTE = "grpc://"
"""The prefix of a scorer's name that is another reward service: grpc://HOST:PORT, or grpc://HOST:PORT/SCORER."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Another reward service; without a `scorer` its default scores."""

    url: str
    client: RewardClient
    scorer: str | None

    @classmethod
    def of(cls, url: str) -> Remote:
        """Asks nobody yet. Raises ConfigError for a wrong URL."""
        address, _, scorer = url.removeprefix(REMOTE).partition("/")
        try:
            client = RewardClient(str(Address.parse(address)))
        except ConfigError as error:
            raise ConfigError(f"scorer {url}: write {REMOTE}HOST:PORT, or {REMOTE}HOST:PORT/SCORER") from error
        return cls(url, client, scorer or None)


@dataclass(frozen=True, slots=True)
class Scorer:
    """One way to score: a user's function, one of headrace's own, or another service.

    A `boxed` one sees what a response has boxed. One that was set while the service runs has workers of its own.
    """

    name: str
    version: str
    description: str
    hook: RewardHook | None = None
    builtin: Builtin | None = None
    boxed: bool = False
    settings: str = ""
    """A digest of the job's options that its scores depend on; empty: there are none."""
    key: str | None = None
    """The part of a dict reward; None: the job's --reward-key."""
    remote: Remote | None = None
    composition: Composition | None = None
    workers: WorkerPool | None = field(default=None, compare=False)

    def all(self) -> Iterator[Scorer]:
        """Itself and the scorers of its parts."""
        yield self
        for each in self.composition.parts if self.composition else ():
            yield from each.scorer.all()

    def with_workers(self, workers: WorkerPool) -> Scorer:
        """The same, scored by these workers."""
        composition = self.composition and replace(
            self.composition,
            parts=tuple(replace(each, scorer=each.scorer.with_workers(workers)) for each in self.composition.parts),
        )
        return replace(self, workers=workers, composition=composition)

    async def close(self) -> None:
        """Ends the workers and the connections that are its own."""
        if self.workers:
            await self.workers.close()
        for each in self.all():
            if each.remote:
                await each.remote.client.close()


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """A part, who scores it, and what is laid over the row's metadata then."""

    part: Part
    scorer: Scorer
    metadata_overrides: Mapping[str, Any]

    def seen(self, item: ScoreItem) -> ScoreItem:
        """The item as the part's scorer gets it."""
        return replace(item, metadata={**item.metadata, **self.metadata_overrides}) if self.metadata_overrides else item


@dataclass(frozen=True, slots=True)
class Composition:
    """A reward of several parts."""

    parts: tuple[ScoredPart, ...]
    combine: Combine
    clip: tuple[float, float] | None = None

    @property
    def rules(self) -> Sequence[Part]:
        """The parts without their scorers."""
        return [each.part for each in self.parts]


class Registry:
    """The scorers by name. Raises ConfigError when the default is none of them."""

    def __init__(self, scorers: Iterable[Scorer], default: str | None, of_evaluations: Iterable[Scorer] = ()) -> None:
        self._scorers = {scorer.name: scorer for scorer in scorers}
        self._of_evaluations = {scorer.name: scorer for scorer in of_evaluations}
        if default is not None and self._find(default) is None:
            raise ConfigError(f"rm_type is {self._unknown(default)}")
        self.default = default

    @classmethod
    def of(
        cls,
        rm_type: str | None,
        custom: RewardHook | None,
        of_evaluations: Iterable[RewardHook] = (),
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> Registry:
        """Takes the installed scorers, as the default the user's function, and those of single evaluations by path.

        `settings` are digests of the options that scorers depend on, by their names.
        """
        versions = installed()
        scorers = [
            Scorer(
                each.name,
                f"{versions[each.name]} {settings.get(each.name, '')}".rstrip(),
                each.description,
                builtin=each,
                settings=settings.get(each.name, ""),
            )
            for each in BUILTINS
            if each.name in versions
        ]
        if custom:
            scorers.append(users_scorer(CUSTOM, custom, settings.get(CUSTOM, "")))
        elif rm_type and rm_type.startswith(REMOTE):
            scorers.append(remote_scorer(rm_type))
        return cls(scorers, CUSTOM if custom else rm_type, [users_scorer(hook.path, hook) for hook in of_evaluations])

    def with_default(self, scorer: Scorer) -> Registry:
        """The same scorers, and another one as the default."""
        return Registry([*self.all(), scorer], scorer.name, self._of_evaluations.values())

    def knows(self, path: str) -> bool:
        """True for a function of a data source or an evaluation that can be asked for by its path."""
        return path in self._of_evaluations

    def add(self, hook: RewardHook) -> None:
        """Adds a function that a sample names itself."""
        self._of_evaluations[hook.path] = users_scorer(hook.path, hook)

    def all(self) -> list[Scorer]:
        return [self._scorers[name] for name in sorted(self._scorers)]

    def require(self, name: str) -> Scorer:
        """Raises NotFound, listing the scorers that exist."""
        found = self._find(name)
        if found is None:
            raise NotFound(f"there is no scorer {self._unknown(name)}", reason="SCORER_UNKNOWN")
        return found

    def choose(self, item: ScoreItem, requested: Scorer | None, payer: Scorer | None = None) -> Scorer | ScoreError:
        """Returns the item's scorer, or the error SCORER_UNKNOWN. A `payer` was set while the service runs."""
        if path := own_function(item):
            return self._of_evaluations[path]
        named = item.metadata.get("rm_type")
        if isinstance(named, str) and named in self._of_evaluations:
            return self._of_evaluations[named]
        if payer and not requested:
            return payer
        if self.default in (CUSTOM, COMPOSED):
            return requested or self._scorers[self.default]
        if named is None and requested:
            return requested
        name = self.default if named is None else named
        if name is None:
            return ScoreError(
                "SCORER_UNKNOWN", "no scorer is named: set metadata.rm_type, the request's scorer or --rm-type"
            )
        found = self._find(name) if isinstance(name, str) else None
        return found or ScoreError("SCORER_UNKNOWN", f"metadata.rm_type is {self._unknown(name)}")

    def _find(self, name: str) -> Scorer | None:
        if name in self._scorers:
            return self._scorers[name]
        inner = self._scorers.get(name.removeprefix(BOXED))
        return replace(inner, name=name, boxed=True) if inner and inner.builtin else None

    def _unknown(self, name: object) -> str:
        if not isinstance(name, str):
            return f"a {type(name).__name__}, not a name: there are {', '.join(sorted(self._scorers))}"
        if missing := next((each for each in BUILTINS if each.name == name.removeprefix(BOXED)), None):
            return f"{name}, which needs the package {missing.package}: pip install 'headrace[{missing.extra}]'"
        near = nearest(name, self._scorers)
        hint = f"did you mean {near!r}? " if near else ""
        return f"{shown(name)}: {hint}There are {', '.join(sorted(self._scorers))}"


def own_function(item: ScoreItem) -> str | None:
    """The path of the function that the item names itself."""
    path = item.hook_fields.get(CUSTOM_RM_PATH)
    return path if isinstance(path, str) and path else None


def remote_scorer(url: str) -> Scorer:
    return Scorer(url, url, "The scores of another reward service.", remote=Remote.of(url))


def users_scorer(name: str, hook: RewardHook, settings: str = "") -> Scorer:
    return Scorer(name, version_of(hook, hook.version, settings), hook.description, hook, settings=settings)


def version_of(hook: RewardHook, digest: str, settings: str) -> str:
    """The path of a user's function, the digest of its file, and that of its settings."""
    return " ".join(filter(None, (hook.path, digest, settings)))


@dataclass(slots=True)
class CustomResult:
    """A reward, why there is none, or None from a scorer that abstains; the item's metadata if the function changed it.

    `version` is the digest of the file that the worker has loaded.
    """

    reward: Reward | NoReward | None
    metadata: dict[str, Any] | None = None
    version: str | None = None


async def run_custom(path: str, form: RewardForm, args: HookArgs, items: Sequence[ScoreItem]) -> list[CustomResult]:
    """Returns one result an item. Raises the function's error, or InvalidArgument."""
    samples = [_sample(i, item) for i, item in enumerate(items)]
    rewards = await run_reward(path, form, args, samples)
    version = load_hook(path).version
    return [replace(_result(path, *each), version=version) for each in zip(rewards, samples, items, strict=True)]


def _result(path: str, reward: Reward | NoReward | None, sample: Sample, item: ScoreItem) -> CustomResult:
    try:
        if not isinstance(sample.metadata, dict):
            raise InvalidArgument(f"{type(sample.metadata).__name__} is no dict")
        text = to_json(sample.metadata)
        require_bytes(len(text.encode()), MAX_JSON_BYTES, "metadata")
    except InvalidArgument as error:
        return CustomResult(f"hook {path} left metadata that cannot be stored: {error.message}")
    return CustomResult(reward, None if text == to_json(item.metadata) else from_json(text))


def _sample(index: int, item: ScoreItem) -> Sample:
    sample = Sample(
        index=index if item.index is None else item.index,
        prompt=_prompt(item.prompt),
        response=item.response,
        response_length=item.response_tokens,
        label=label_for_hooks(item.label, item.hook_fields),
        status=Sample.Status(item.status or "completed"),
        metadata=copy.deepcopy(dict(item.metadata)),
    )
    if item.columns:
        sample.tokens = item.columns[TOKENS].tolist()
        sample.loss_mask = item.columns[LOSS_MASK].tolist()
        sample.rollout_log_probs = item.columns[ROLLOUT_LOG_PROBS].tolist()
    return sample


def _prompt(text: str) -> str | list[dict[str, Any]]:
    """Returns messages when the prompt is a JSON array of them, else the text itself."""
    if not text.startswith("[{"):
        return text
    try:
        messages = json.loads(text)
    except ValueError:
        return text
    is_chat = all(isinstance(m, dict) and "role" in m for m in messages)
    return messages if is_chat else text
