"""Stores that make a ledger durable: memory, SQLite with payload files, or PostgreSQL, behind one protocol (`base`).

In: transactions, in order. Out: the rows at start, payloads by sample, and a copy of everything while it serves.
"""
