"""The faults of ``docs/reliability.md`` on real etcd servers, with real processes.

The default run takes a few of them, and the newest etcd. All of it, on every etcd version found:

    python -m pytest tests/faults -m "" --every-etcd

The churn test's rounds and seed are chosen with
``RDZV_ETCD_CHURN_ROUNDS`` and ``RDZV_ETCD_CHURN_SEED``.
"""
