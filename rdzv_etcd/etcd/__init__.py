"""Talks to etcd: the only package that imports grpc, protobuf and etcd3. Knows no rounds.

=================  ================================================================================
``port``           what this library needs of an etcd, as plain values and one protocol
``reads``          over the port: a range in parts, and the puts after a read
``client``         the port over gRPC: which of etcd's calls answers what
``retry``          endpoints behind one call: failover, and how often each kind of call is tried
``channel``        one endpoint: its gRPC channel, calls and streams
``auth``           the user's token and the TLS files
``watch``          watches that resume without a gap
``watch_check``    whether watches are deaf
``messages``       etcd's messages, from and to the port's values
``errors``         failures: what they mean for a retry, and which error they become
``first_contact``  what is wrong with an endpoint that cannot be reached
``grpc_start``     imports gRPC, quietly
=================  ================================================================================

A call goes from ``client`` through ``Failover.call`` and ``Server.unary`` to gRPC.
"""
