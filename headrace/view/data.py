"""What the page is given: one value for the run, and one for each step, evaluation and step's tokens.

web/src/data.ts has the same fields as types. Values are JSON's; numbers that are not finite are null.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace import __version__
from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.job.schema.job import Job, changes
from headrace.job.schema.run import ModelSection
from headrace.models.tokenizer.tokenizer import TOKENIZER_JSON
from headrace.run_folder import MetricsRow, RunFolder, fields_in, is_evaluation
from headrace.sample_log import Answer, SampleLog
from headrace.traces import Span, by_trace, lane_of, lanes_of, of_sample, read_spans, span_files

VERSION = 1
MOST_ROWS = 2_000
"""Steps of the curves; of a longer run each k-th is shown."""
PROMPT_CHARACTERS = 200
_DIGITS = 6
_LAG = "staleness/lag_"
_NUMBERED = re.compile(r"(step|tokens|eval)-(\d{7,18})")
_LINE_ENDS = {"<": "\\u003c", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What ends a script, or a line of one, although it stands in a string."""

Value = dict[str, Any]


def script(name: str, value: Value) -> bytes:
    """A file that hands the value to the page: one that was opened as a file may load scripts, but read no files."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escaped in _LINE_ENDS.items():
        text = text.replace(character, escaped)
    return f"headrace.load({json.dumps(name)},{text});\n".encode(errors="replace")


def step_name(kind: str, step: int) -> str:
    """The name of one step's data, as `tokens-0000009`."""
    return f"{kind}-{step:07}"


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """What the ledger said of its train stream, and when (seconds since 1970)."""

    stats: pb.StreamStats
    time: float


class RunData:
    """Reads a run's folder. Everything here touches the disk."""

    def __init__(self, run: RunFolder) -> None:
        """Raises NotFound for a folder without a job, DataLoss for the job of another release."""
        self._run = run
        self._job = run.job()
        self.log = SampleLog(run.samples)
        self._texts = TokenTexts(self._job.model.hf_checkpoint)
        self._untrained: tuple[object, Value] | None = None
        self._traces: tuple[object, Mapping[str, Sequence[Span]]] = (None, {})
        self._prompts: dict[int, list[tuple[str, float | None]]] = {}
        """Prompt and mean reward of each group, of the steps that were read."""

    def value(self, name: str) -> Value | None:
        """The data of that name; None where there are none. The overview has a method of its own."""
        if name == "untrained":
            return self.untrained()
        if name == "prompts":
            return self.prompts()
        if not (found := _NUMBERED.fullmatch(name)):
            return None
        kind, step = found[1], int(found[2])
        there, read = self._numbered[kind]
        return read(step) if step in there() else None

    @property
    def _numbered(self) -> Mapping[str, tuple[Callable[[], Sequence[int]], Callable[[int], Value]]]:
        return {
            "step": (self.log.steps, self.step),
            "tokens": (self.log.steps_with_tokens, self.tokens),
            "eval": (self.log.evaluations, self.evaluation),
            "trace": (self.log.steps, self.trace),
        }

    def overview(self, ledger: LedgerCounts | None, notes: Sequence[str] = ()) -> Value:
        """All that is about the run as a whole."""
        rows = list(map(MetricsRow.of, fields_in(self._run.metrics)))
        by_step = {row.step: row for row in rows if not is_evaluation(row.metrics)}
        evaluations = {row.step: row for row in rows if is_evaluation(row.metrics)}
        last = max(by_step, default=None)
        shown = _thinned(list(by_step.values()))
        untrained = self.untrained()
        return {
            "version": VERSION,
            "headrace": __version__,
            "run": self._run.path.name,
            "folder": str(self._run.path),
            "made": time.time(),
            "live": self._is_running,
            "state": {"phase": self._phase(last), "step": last, "num_rollout": self._job.rollout.num_rollout},
            "job": _facts(self._job),
            "metrics": _columns(shown),
            "evaluations": _columns(list(evaluations.values())),
            "marks": [[row.step, mark] for row in by_step.values() for mark in row.marks],
            "warnings": [[row.step, warning] for row in rows for warning in row.warnings],
            "steps": self._steps(by_step),
            "evals": self.log.evaluations(),
            "traced": self.is_traced,
            "untrained": untrained["counts"],
            "ledger": _ledger(ledger, untrained["groups"], list(by_step.values())),
            "tokenizer": {"error": self._texts.error if self.log.steps_with_tokens() else None},
            "notes": [*self._notes(by_step, shown), *notes],
        }

    @property
    def _is_running(self) -> bool:
        return bool(self._run.running_services())

    def _phase(self, last: int | None) -> str:
        if self._is_running:
            return "running"
        return "finished" if (last or 0) >= self._job.rollout.num_rollout else "interrupted"

    def _steps(self, rows: Mapping[int, MetricsRow]) -> Value:
        steps, with_tokens = self.log.steps(), set(self.log.steps_with_tokens())
        counts = [rows[step].metrics.get("samples/count") if step in rows else None for step in steps]
        return {
            "step": steps,
            "samples": counts,
            "groups": [self._job.rollout.rollout_batch_size] * len(steps),
            "tokens": [int(step in with_tokens) for step in steps],
        }

    def _notes(self, rows: Mapping[int, MetricsRow], shown: Sequence[MetricsRow]) -> Iterator[str]:
        steps = self.log.steps()
        if not self._job.tracking.sample_log_bytes:
            yield "The job keeps no samples: --sample-log-bytes is 0."
        elif missing := sorted(rows.keys() - set(steps)):
            yield (
                f"{len(missing)} of {len(rows)} steps have no samples here: the oldest go when the folder has "
                f"{self._job.tracking.sample_log_bytes:,} bytes (--sample-log-bytes)."
            )
        if steps and not self.log.steps_with_tokens():
            yield "No tokens were recorded: an earlier release trained these steps."
        elif steps:
            yield "Tokens are kept for all samples of each eighth step, and for the eight best and worst of the others."
        if len(shown) < len(rows):
            yield f"Curves show {len(shown):,} of {len(rows):,} steps."

    def step(self, step: int, *, has_tokens: bool = True) -> Value:
        """The groups that a step trained. `has_tokens`: its tokens are beside it, where any were recorded."""
        ids = self.log.ids_with_tokens(step) if has_tokens else set()
        groups = _groups(self.log.of_step(step), ids)
        self._prompts[step] = [(group["prompt"], _mean_reward(group["samples"])) for group in groups]
        return {"step": step, "groups": groups}

    def evaluation(self, step: int) -> Value:
        """The groups of the evaluation after a step, one data set after the other."""
        groups = _groups(self.log.of_evaluation(step))
        return {"step": step, "groups": sorted(groups, key=lambda group: str(group["set"]))}

    def untrained(self) -> Value:
        """Groups that failed or were filtered, the newest first."""
        files = self.log.untrained_files()
        if self._untrained is None or self._untrained[0] != files:
            answers = list(self.log.untrained())
            counts = Counter("failed" if answer.failure_reason else "filtered" for answer in answers)
            value = {"counts": {"failed": counts["failed"], "filtered": counts["filtered"]}, "groups": _groups(answers)}
            self._untrained = (files, value)
        return self._untrained[1]

    def prompts(self) -> Value:
        """Which prompt was trained in which steps."""
        found: dict[str, list[tuple[int, int, float | None]]] = {}
        for step in self.log.steps():
            if step not in self._prompts:
                self.step(step, has_tokens=False)
            for number, (prompt, mean) in enumerate(self._prompts[step]):
                found.setdefault(prompt, []).append((step, number, mean))
        return {"texts": [prompt[:PROMPT_CHARACTERS] for prompt in found], "at": list(found.values())}

    @property
    def is_traced(self) -> bool:
        """True where processes of this machine have written spans."""
        return bool(span_files(self._run))

    def trace(self, step: int) -> Value:
        """The spans of a step's samples that were traced, and of the steps that trained them. Times are in seconds."""
        if (sizes := [(file, file.stat().st_size) for file in span_files(self._run)]) != self._traces[0]:
            self._traces = (sizes, by_trace(read_spans(self._run)))
        name, ids = self._job.run.run_name, (answer.sample_id for answer in self.log.of_step(step))
        lives = {sample_id: of_sample(self._traces[1], name, sample_id) for sample_id in ids}
        lanes = lanes_of(span for spans in lives.values() for span in spans)
        return {
            "lanes": lanes,
            "samples": {i: [_span(span, lanes) for span in spans] for i, spans in lives.items() if spans},
        }

    def tokens(self, step: int) -> Value:
        """The samples of a step that were recorded token by token."""
        columns = list(self.log.tokens_of(step))
        ids = sorted({token for each in columns for token in each.tokens})
        numbers = {token: number for number, token in enumerate(ids)}
        samples = {
            each.sample_id: {
                "t": [numbers[token] for token in each.tokens],
                "n": len(each.tokens) - len(each.loss_mask),
                "mask": each.loss_mask,
                "engine": each.engine_log_probs,
                "trainer": each.trainer_log_probs,
                "advantage": each.advantages,
            }
            for each in columns
        }
        return {"step": step, "texts": self._texts.of(ids), "ids": ids, "samples": samples}


def _span(span: Span, lanes: Sequence[str]) -> list[object]:
    name = re.split(r"[./]", span.name)[-1]
    return [lanes.index(lane_of(span)), name, round(span.begun / 1e6, 5), round(span.ended / 1e6, 5), span.error]


def _thinned(rows: list[MetricsRow]) -> list[MetricsRow]:
    """Each k-th, counted from the last one."""
    stride = math.ceil(len(rows) / MOST_ROWS) or 1
    return rows[(len(rows) - 1) % stride :: stride] if rows else []


def _columns(rows: Sequence[MetricsRow]) -> Value:
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return {
        "step": [row.step for row in rows],
        "time": [round(row.time, 2) for row in rows],
        "columns": {name: [_number(row.metrics.get(name)) for row in rows] for name in names},
    }


def _number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def _facts(job: Job) -> list[tuple[str, str]]:
    """The model, and the options that differ from what they are without a job."""
    default = Job(model=ModelSection(hf_checkpoint=job.model.hf_checkpoint))
    named = [("model", job.model.hf_checkpoint.name)]
    return named + [(change.name, change.new) for change in changes(default, job) if change.is_told]


def _groups(answers: Iterable[Answer], with_tokens: set[str] | frozenset[str] = frozenset()) -> list[Value]:
    """Groups in the order of their first samples; a group's samples by index."""
    by_group: dict[str, list[Answer]] = {}
    for answer in answers:
        by_group.setdefault(answer.group_id, []).append(answer)
    return [
        {
            "id": group_id,
            "prompt": samples[0].prompt,
            "label": samples[0].label,
            "set": _data_set(group_id),
            "version": min((version for each in samples for version, *_ in each.policy_ranges), default=None),
            "samples": [_sample(each, each.sample_id in with_tokens) for each in sorted(samples, key=_index)],
        }
        for group_id, samples in by_group.items()
    ]


def _data_set(group_id: str) -> str | None:
    """That of an evaluation's group, whose id is eval/NAME/ROW; None of others."""
    return group_id.removeprefix("eval/").rpartition("/")[0] if group_id.startswith("eval/") else None


def _index(answer: Answer) -> int:
    return answer.index


def _sample(answer: Answer, has_tokens: bool) -> Value:
    failure = None if answer.failure_reason is None else [answer.failure_reason, answer.failure_message or ""]
    return {
        "id": answer.sample_id,
        "index": answer.index,
        "status": answer.status,
        "reward": _number(answer.reward),
        "parts": {name: _number(value) for name, value in answer.reward_parts.items()},
        "advantage": _number(answer.advantage),
        "gap": _number(answer.log_prob_gap),
        "scorer": answer.scorer,
        "scorer_version": answer.scorer_version,
        "prompt_tokens": answer.prompt_tokens,
        "response_tokens": answer.response_tokens,
        "trained_tokens": answer.trained_tokens,
        "ranges": answer.policy_ranges,
        "response": answer.response,
        "turns": answer.turns,
        "metadata": json.loads(answer.metadata) if answer.metadata else None,
        "failure": failure,
        "dropped": answer.dropped_reason,
        "has_tokens": has_tokens,
    }


def _mean_reward(samples: Sequence[Value]) -> float | None:
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    return _number(fmean(rewards)) if rewards else None


def _ledger(counts: LedgerCounts | None, untrained: Sequence[Value], rows: Sequence[MetricsRow]) -> Value:
    """States are the ledger's; reasons are those in the sample log, and staleness the metrics', of all starts."""
    samples = [sample for group in untrained for sample in group["samples"]]
    failures = Counter(sample["failure"][0] for sample in samples if sample["failure"])
    filtered = Counter(sample["dropped"] for sample in samples if sample["dropped"])
    lags = sorted({int(name.removeprefix(_LAG)) for row in rows for name in row.metrics if name.startswith(_LAG)})
    produced = [row.metrics["samples/produced"] for row in rows if "samples/produced" in row.metrics]
    return {
        "source": "metrics" if counts is None else "ledger",
        "time": None if counts is None else counts.time,
        "states": None if counts is None else dict(counts.stats.groups),
        "failures": failures.most_common(),
        "filtered": filtered.most_common(),
        "staleness": [[lag, fmean(row.metrics.get(f"{_LAG}{lag}", 0.0) for row in rows)] for lag in lags] or None,
        "produced": sum(produced) if produced else None,
    }


# The texts of single tokens, as a person reads them beside each other.


_BYTE = "<0x"
_SPACE = "▁"


class TokenTexts:
    """Reads a model folder's tokenizer.json by the package tokenizers; nothing of the folder is run."""

    def __init__(self, model: Path) -> None:
        self._file = model / TOKENIZER_JSON

    @property
    def error(self) -> str | None:
        """Why there are no texts."""
        return self._loaded if isinstance(self._loaded, str) else None

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """One text for each token, with bytes that are no whole character in hexadecimal; None without a tokenizer."""
        return None if isinstance(self._loaded, str) else [self._loaded(token) for token in ids]

    @cached_property
    def _loaded(self) -> Callable[[int], str] | str:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return (
                "the package tokenizers is not installed here, so tokens are shown as numbers: pip install tokenizers"
            )
        if not self._file.is_file():
            return f"{self._file} is not there, so tokens are shown as numbers: run headrace view where the model is"
        try:
            tokenizer = Tokenizer.from_file(str(self._file))
            decoder = json.loads(self._file.read_bytes()).get("decoder")
        except Exception as error:  # noqa: BLE001  # tokenizers raises plain Exception for a damaged file
            return f"{self._file} cannot be read, so tokens are shown as numbers: {error}"
        added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        return _texts(tokenizer.id_to_token, added, "ByteLevel" in _kinds(decoder))


def _texts(
    piece_of: Callable[[int], str | None], added: Mapping[int, str], is_byte_level: bool
) -> Callable[[int], str]:
    def text(token: int) -> str:
        piece = piece_of(token)
        if piece is None or token in added:
            return added.get(token, f"<{token}>")
        if is_byte_level and all(character in _BYTES for character in piece):
            return _of_bytes(bytes(_BYTES[character] for character in piece))
        if piece.startswith(_BYTE):
            return _of_bytes(bytes([int(piece[len(_BYTE) : -1], 16)]))
        return piece.replace(_SPACE, " ")

    return text


def _of_bytes(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of those that it is made of."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_kinds(each) for each in decoder.get("decoders") or ()))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable characters stand for their bytes, and those from U+0100 on for the others, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_alphabet()
