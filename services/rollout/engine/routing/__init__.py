"""The router between requests and engines: sglang-router in a process of its own.

In: the engines that serve. Out: one URL, which goes on when its process is replaced.
"""
