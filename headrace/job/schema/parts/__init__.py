"""Values of a job that have a shape of their own, for its sections."""
