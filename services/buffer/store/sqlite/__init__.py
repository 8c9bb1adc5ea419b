"""The ledger in a folder: SQLite holds every row and is the only truth; payloads lie in append-only files beside it.

A payload is synced before the transaction that names its place. What is damaged is named, and the rest is served.
"""
