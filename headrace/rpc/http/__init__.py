"""HTTP ports: who may connect, for how long, and the certificates of both sides."""
