"""Links between the nodes of a job, over which a death is noticed long before a lease runs out.

:mod:`rdzv_etcd.peers.api` is the port, :mod:`rdzv_etcd.peers.tcp` what carries it. Knows nothing of
etcd, rounds or leases.
"""
