"""Model families, one a file: how a config.json is read, and which tensors a checkpoint has.

In: a Hugging Face config. Out: an architecture and its table of weights. `registry` lists the families.
"""
