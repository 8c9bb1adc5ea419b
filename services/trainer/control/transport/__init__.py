"""The ways on which weights get from the ranks to the engines, as rank 0 sees them.

In: a version that the ranks have. Out: what BeginPublish says about it, the weights at the engines, their checksums.
"""
