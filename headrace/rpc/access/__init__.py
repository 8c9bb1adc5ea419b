"""Who calls, and what they may call: roles, the table of RPCs, and where a caller's role is read."""
