"""Finds the text in a conversation that its assistants wrote, for models with any chat template.

In: chat messages and a tokenizer's template. Out: its text in parts that are trained and parts that are not.
"""
