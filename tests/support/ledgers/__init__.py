"""Ledgers, stores and samples for tests, and histories to check them against."""
