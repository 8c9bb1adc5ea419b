"""The four services. Each runs by itself, speaks gRPC, and imports `headrace` but no other service."""
