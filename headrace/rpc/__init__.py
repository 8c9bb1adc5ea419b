"""One way to be a gRPC server and one way to be a client."""
