"""A checkpoint's tokenizer, and the code that its folder may bring.

In: a Hugging Face folder. Out: transformers' tokenizer of it, or a folder that needs no code of its own.
"""
