"""Megatron-core as the trainer uses it; the only place that knows its versions and its private parts.

In: the job's Megatron arguments. Out: process groups (`parallel`), configs, the optimizer, and models (`gpt`).
"""

from services.trainer.megatron.loading import load_megatron

load_megatron()
