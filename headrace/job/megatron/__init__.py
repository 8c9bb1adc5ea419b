"""Megatron-core's arguments by their own names: every field, its type, and who may set it.

In: names and values from a job. Out: typed arguments, or the reason for a refusal.
"""
