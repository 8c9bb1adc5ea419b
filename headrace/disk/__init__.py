"""Files that several processes read and write: each is replaced whole, and changed by one command at a time.

In: a path, and what its file should say. Out: the old file or the new one, never half of it.
"""
