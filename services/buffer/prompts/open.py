"""From a stream's sources to the walk over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from services.buffer.prompts.data_source import DataSourceWalk
from services.buffer.prompts.indexed import IndexedFile
from services.buffer.prompts.jsonl import JsonlBlocks, JsonlRows, read_jsonl_block
from services.buffer.prompts.mix import PromptMix
from services.buffer.prompts.row import RowReader
from services.buffer.prompts.shard import PromptShard
from services.buffer.prompts.streamed import StreamedFile
from services.buffer.prompts.walk import PromptWalk
from services.buffer.source import FileSource
from services.buffer.stream import StreamConfig


def open_files(files: Sequence[FileSource]) -> PromptMix:
    """Reads what has to be read once. Raises InvalidArgument naming what cannot be read, by file and line."""
    names = Counter(Path(file.path).name for file in files)
    readers = []
    for i, file in enumerate(files):
        name = Path(file.path).name
        readers.append(RowReader(file, name if names[name] == 1 else f"{i}.{name}"))
    return PromptMix([_walk(reader) for reader in readers], [file.weight for file in files])


def open_prompts(config: StreamConfig, data_source: DataSourceWalk | None = None) -> PromptMix:
    """A stream's prompts; of a shard, its part of them."""
    whole = PromptMix([data_source], [1.0]) if data_source else open_files(config.files)
    return PromptShard(whole, config.shard, config.num_shards) if config.num_shards > 1 else whole


def _walk(reader: RowReader) -> PromptWalk:
    if not reader.source.path.endswith(".parquet"):
        if reader.source.streaming:
            return StreamedFile(JsonlBlocks(reader), read_jsonl_block, reader)
        return IndexedFile(JsonlRows(reader), reader)
    # pyarrow takes a quarter of a second to import: only for those who have such files.
    from services.buffer.prompts.parquet import ParquetBlocks, ParquetRows, read_parquet_block

    if reader.source.streaming:
        return StreamedFile(ParquetBlocks(reader), read_parquet_block, reader)
    return IndexedFile(ParquetRows(reader), reader)
