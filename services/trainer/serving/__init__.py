"""What people see of a run and how they steer it: gRPC, metrics files, pictures, trackers, evaluations.

In: the loop's progress, and requests to pause, save, export or stop. Out: answers, events, and the run's files.
"""
