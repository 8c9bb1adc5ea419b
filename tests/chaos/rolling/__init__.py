"""Services that are restarted on purpose, under load."""
