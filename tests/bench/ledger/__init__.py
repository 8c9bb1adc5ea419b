"""Benches of the ledger as a server: shards, and a crowd that waits."""
