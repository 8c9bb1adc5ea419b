"""Relates a job to its model: parallel sizes, virtual stages, context length, and Megatron's config.

In: an architecture and the job's Megatron arguments. Out: fields of a TransformerConfig, or the reason for a refusal.
"""
