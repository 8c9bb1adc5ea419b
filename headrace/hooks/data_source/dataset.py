"""The rows of the job's prompt files, for a data source that draws from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, InvalidArgument
from headrace.hooks.args import HookArgs
from headrace.hooks.sample import Sample
from headrace.images import with_images
from headrace.prompts import content_of, label_as_given, parse_row, required, rows_of, value_at

if TYPE_CHECKING:  # a job's schema is most of what the processes of user code would import
    from headrace.job.schema.section import PromptPath


class Dataset:
    """`--prompt-data` by its keys and slices, read when it is first asked for something."""

    def __init__(self, args: HookArgs) -> None:
        self._args = args
        self._rows: list[Sample] | None = None
        self._order: list[int] = []
        self._epoch = 0

    @classmethod
    def of_example(cls, args: HookArgs) -> Dataset:
        """A dataset of one question, to try a class where there is no job."""
        dataset = cls(args)
        if not args.prompt_data:
            dataset._rows = [Sample(prompt="What is 3 + 4?", label="7")]
        return dataset

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, row: int) -> Sample:
        return _copy(self._read()[row])

    def sample(self, num_samples: int) -> list[Sample]:
        """The next rows: each once in an epoch, in the files' order or, with --rollout-shuffle, in a drawn one.

        Fewer than asked for when --num-epoch epochs are over.
        """
        drawn: list[Sample] = []
        while len(drawn) < num_samples and (self._order or self._begin_epoch()):
            drawn.append(self[self._order.pop()])
        return drawn

    def _begin_epoch(self) -> bool:
        """False when there is no other."""
        if self._args.num_epoch is not None and self._epoch >= self._args.num_epoch:
            return False
        self._order = list(range(len(self) - 1, -1, -1))
        if self._args.rollout_shuffle:
            keys = random.Random(f"{self._args.rollout_seed}/{self._epoch}")
            self._order.sort(key={row: keys.random() for row in self._order}.__getitem__)
        self._epoch += 1
        return bool(self._order)

    def _read(self) -> list[Sample]:
        if self._rows is None:
            if not self._args.prompt_data:
                raise ConfigError("the data source draws from its dataset: give the job --prompt-data")
            self._rows = [sample for text in self._args.prompt_data for sample in _samples(self._args, text)]
        return self._rows


def _copy(sample: Sample) -> Sample:
    """A user's class may change one draw of a row: the next draw is as the file has it."""
    prompt = sample.prompt if isinstance(sample.prompt, str) else [dict(turn) for turn in sample.prompt]
    return replace(sample, prompt=prompt, metadata=dict(sample.metadata))


def _samples(args: HookArgs, text: str) -> Iterator[Sample]:
    from headrace.job.schema.section import PromptPath

    part = PromptPath.parse(text)
    for number, row in _rows(part):
        try:
            yield _sample(args, parse_row(row), part.path.parent)
        except InvalidArgument as error:
            if not args.skip_bad_lines:
                raise InvalidArgument(
                    f"{part.path}, line {number}: {error.message}: correct it, or set skip_bad_lines"
                ) from error


def _rows(part: PromptPath) -> Iterator[tuple[int, Any]]:
    if part.path.suffix == ".parquet":
        import pyarrow.parquet as pq  # takes a quarter of a second: only for those who have such files

        rows = (row for batch in pq.ParquetFile(part.path).iter_batches() for row in batch.to_pylist())
        yield from islice(enumerate(rows, 1), part.first_row, part.end_row)
    else:
        with open(part.path, "rb") as file:
            yield from rows_of(file, part.path, part.first_row, part.end_row)


def _sample(args: HookArgs, row: dict[str, Any], folder: Path) -> Sample:
    metadata = dict(value_at(row, args.metadata_key) or {}) if args.metadata_key else {}
    if args.tool_key and (tools := value_at(row, args.tool_key)) is not None:
        metadata["tools"] = tools
    label = label_as_given(required(row, args.label_key)) if args.label_key else None
    prompt = content_of(row, args.input_key)
    if key := args.multimodal_keys.get("image"):
        prompt = with_images(prompt, row, key, folder)
    return Sample(prompt=prompt, label=label, metadata=metadata)
