"""`headrace migrate`: makes a job of what starts a run of slime, verl, TRL or prime-rl, without running any of it."""
