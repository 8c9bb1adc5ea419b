"""Files that survive a power loss, and work on files that all ranks do or none.

In: a path and its content, or a function that touches a rank's disk. Out: a durable file, or one error on all ranks.
"""
