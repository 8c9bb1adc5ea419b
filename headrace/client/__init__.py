"""Clients of the four services, for programs: asyncio, plain arguments, typed errors, deadlines.

`open_buffer(address)` is in `headrace.client.open`; `RolloutClient`, `RewardClient` and `TrainerClient` are in modules
of their names. Addresses are in `services.json` of a run's folder; docs/client.md has a whole program.
"""
