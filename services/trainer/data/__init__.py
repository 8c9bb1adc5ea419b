"""The samples of a step on their way in, and what is written down about them.

In: sample ids and the buffer's payloads. Out: samples that can be trained, and a record of those used and set aside.
"""
