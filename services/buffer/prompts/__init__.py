"""Readers of prompt files and of users' data source classes.

In: a stream's sources and a cursor for each. Out: the next prompts and the new cursor; readers keep no other state.
"""
