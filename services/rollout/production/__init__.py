"""Production turns a leased prompt into a group of samples in the buffer.

In: leases, the job's sampling parameters, engines, rewards. Out: puts, released leases, and partial groups.
"""
