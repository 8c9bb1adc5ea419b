"""Checkpoint folders of Megatron-core (`torch_dist`), as slime's converter and Megatron-LM write them. Knows no torch.

In: a folder from anywhere. Out: where each weight of an architecture lies in it, or an error that names what is wrong.
Its files are pickles: none is unpickled in the usual sense, and nothing that they name is imported (`pickled.py`).
"""
