"""Holding the ledger's history against what the trainer was fed."""
