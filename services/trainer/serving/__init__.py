"""Shows a run to people and lets them steer it: gRPC, metrics files, pictures, trackers, evaluations.

In: the loop's progress, and requests to pause, save, export or stop. Out: answers, events, and the run's files.
"""
