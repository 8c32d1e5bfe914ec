"""Generated protobuf and gRPC code of package specla.v1; regenerate with `make protos`."""
