"""Weights between Hugging Face folders and the ranks' parameters, one tensor at a time and never a whole model twice.

In: safetensors and the family's table of rows, or this rank's parameters. Out: filled parameters, or a folder.
"""
