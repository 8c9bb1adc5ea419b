"""Opens a stream's prompt sources."""

from __future__ import annotations

from collections.abc import Sequence

from services.buffer.blocking import BlockingPool
from services.buffer.ledger.source import FileSource, source_names
from services.buffer.ledger.stream import StreamConfig
from services.buffer.prompts.data_source import DataSourceReader
from services.buffer.prompts.indexed import IndexedFile
from services.buffer.prompts.jsonl import JsonlBlocks, lines_or_table, read_jsonl_block
from services.buffer.prompts.mix import PromptMix
from services.buffer.prompts.reader import PromptReader
from services.buffer.prompts.row import RowReader
from services.buffer.prompts.shard import ReaderShard
from services.buffer.prompts.streamed import StreamedFile


def open_files(files: Sequence[FileSource], pool: BlockingPool) -> list[PromptReader]:
    """Reads indexed files whole, once. Raises InvalidArgument naming file and line of what cannot be read."""
    return [_reader(RowReader(file, name), pool) for file, name in zip(files, source_names(files), strict=True)]


def open_prompts(config: StreamConfig, data_source: DataSourceReader | None, pool: BlockingPool) -> PromptMix:
    """Opens a stream's prompts, which `pool` reads. A shard gets its part of them."""
    readers: list[PromptReader] = [data_source] if data_source else open_files(config.files, pool)
    if config.num_shards > 1:
        readers = [ReaderShard(reader, config.shard, config.num_shards) for reader in readers]
    return PromptMix(readers)


def _reader(rows: RowReader, pool: BlockingPool) -> PromptReader:
    if not rows.source.path.endswith(".parquet"):
        if rows.source.streaming:
            return StreamedFile(JsonlBlocks(rows), read_jsonl_block, rows, pool)
        return IndexedFile(lines_or_table(rows), rows, pool)
    # pyarrow takes a quarter of a second to import: only for those who have such files.
    from services.buffer.prompts.parquet import ParquetBlocks, ParquetRows, read_parquet_block

    if rows.source.streaming:
        return StreamedFile(ParquetBlocks(rows), read_parquet_block, rows, pool)
    return IndexedFile(ParquetRows(rows), rows, pool)
