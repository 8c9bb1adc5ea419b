"""Services on hosts of their own, at addresses that are not loopback."""
