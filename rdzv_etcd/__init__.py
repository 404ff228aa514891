"""Rendezvous on etcd v3 for torchrun (``--rdzv_backend=etcd3``) and other launchers.

Importing this package imports nothing else: torch loads the entry point in every process that
touches ``torch.distributed.elastic.rendezvous``, training workers included.
"""
