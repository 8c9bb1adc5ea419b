"""Benches of publications: their time by each transport, and the bytes of what changed."""
