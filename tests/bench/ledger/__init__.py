"""Benches of the ledger as a server."""
