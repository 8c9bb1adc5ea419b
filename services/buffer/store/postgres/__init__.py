"""The ledger in PostgreSQL, in a schema of its own, for sites with a managed, replicated database.

One owner at a time; what a failover or the network cut is connected again.
"""
