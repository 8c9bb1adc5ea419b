"""The ledger in a folder: SQLite holds every row and is the only truth; payloads lie in append-only files beside it.

A payload is synced before the transaction that names its location. Damage is reported, and the rest is served.
"""
