"""Opens a stream's prompt sources."""

from __future__ import annotations

from collections.abc import Sequence

from services.buffer.blocking import BlockingPool
from services.buffer.ledger.source import FileSource, source_names
from services.buffer.ledger.stream import StreamConfig
from services.buffer.prompts.data_source import DataSourceWalk
from services.buffer.prompts.indexed import IndexedFile
from services.buffer.prompts.jsonl import JsonlBlocks, JsonlRows, read_jsonl_block
from services.buffer.prompts.mix import PromptMix
from services.buffer.prompts.row import RowReader
from services.buffer.prompts.shard import WalkShard
from services.buffer.prompts.streamed import StreamedFile
from services.buffer.prompts.walk import PromptWalk


def open_files(files: Sequence[FileSource], readers: BlockingPool) -> list[PromptWalk]:
    """Reads indexed files whole, once. Raises InvalidArgument naming file and line of what cannot be read."""
    return [_walk(RowReader(file, name), readers) for file, name in zip(files, source_names(files), strict=True)]


def open_prompts(config: StreamConfig, data_source: DataSourceWalk | None, readers: BlockingPool) -> PromptMix:
    """Opens a stream's prompts, which `readers` will read. A shard gets its part of them."""
    walks: list[PromptWalk] = [data_source] if data_source else open_files(config.files, readers)
    if config.num_shards > 1:
        walks = [WalkShard(walk, config.shard, config.num_shards) for walk in walks]
    return PromptMix(walks)


def _walk(reader: RowReader, readers: BlockingPool) -> PromptWalk:
    if not reader.source.path.endswith(".parquet"):
        if reader.source.streaming:
            return StreamedFile(JsonlBlocks(reader), read_jsonl_block, reader, readers)
        return IndexedFile(JsonlRows(reader), reader, readers)
    # pyarrow takes a quarter of a second to import: only for those who have such files.
    from services.buffer.prompts.parquet import ParquetBlocks, ParquetRows, read_parquet_block

    if reader.source.streaming:
        return StreamedFile(ParquetBlocks(reader), read_parquet_block, reader, readers)
    return IndexedFile(ParquetRows(reader), reader, readers)
