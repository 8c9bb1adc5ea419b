"""Parts that stand in for real ones: engines, reward and rollout services, ledgers in memory, srun."""
