"""Hostile requests below the level of calls: bytes on the ports of gRPC, of metrics and of the OpenAI endpoint."""
