"""The only owner of key paths, of values and of requests to etcd; no I/O."""
