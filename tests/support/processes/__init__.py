"""Real parts as processes: a buffer, PostgreSQL, a whole run, and probes that watch them."""
