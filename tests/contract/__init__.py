"""One suite for the in-memory etcd and for every real version: through the port only.

A difference is a bug in the fake, or in the client.
"""
