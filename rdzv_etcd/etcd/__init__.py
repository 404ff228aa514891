"""Talks to etcd. The only package that imports grpc, protobuf and etcd3; knows no rounds."""
