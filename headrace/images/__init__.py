"""Images of prompts: where a row says they are, their files, and the columns of samples that hold them.

In: a row of a prompt file; the bytes of a file; a sample's columns. Out: content parts; Pillow images; checked columns.
"""
