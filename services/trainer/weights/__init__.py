"""Weights on their way to engines, as the sender sees them: buckets, engine layout, collective group, probe.

In: tensors under Hugging Face names. Out: buckets, the checksums that engines must print, and broadcasts to a group.
"""
