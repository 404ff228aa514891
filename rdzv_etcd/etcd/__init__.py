"""Talks to etcd. The only package that imports grpc, protobuf and etcd3; holds no policy."""
