"""One way to be a gRPC server and one way to be a client, with the same errors on both sides."""
