"""The ledger in PostgreSQL, in a schema of its own, for sites with a managed, replicated database.

It has one owner at a time, which connects again after a failover or a cut of the network.
"""
