"""Several hosts on one machine: network namespaces at addresses of their own, and a switch between them."""
