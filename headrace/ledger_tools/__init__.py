"""Tools over a ledger: audit it against the trainer's record, copy it, export its samples as a table.

In: a buffer's address, or a run's folder. Out: findings, a backup folder, a Parquet file.
"""
