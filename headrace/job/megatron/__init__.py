"""Megatron-core's arguments under their own names: every field, its type, and whether a job may set it.

In: names and values from a job. Out: typed arguments, or the reason for a refusal.
"""
