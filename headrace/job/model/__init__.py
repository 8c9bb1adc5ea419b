"""The model as a job uses it: parallel sizes, virtual stages, context length, and Megatron's config of it.

In: an architecture and the job's Megatron arguments. Out: fields of a TransformerConfig, or the reason for a refusal.
"""
