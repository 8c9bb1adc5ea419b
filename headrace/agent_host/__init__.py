"""An agent host: a process on any machine that plays tasks of a rollout service with the user's agent.

In: a rollout service's address, and the user's function. Out: what each task came to, said to that service.
"""
