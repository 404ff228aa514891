"""The faults of ``docs/reliability.md`` on real etcd servers, with real processes.

The default run takes the newest etcd and the short variants. All of it, the long ones and every
etcd version included:

    python -m pytest tests/faults -m ""

``slow_faults`` marks what only that runs. The churn test's rounds and seed are chosen with
``RDZV_ETCD_CHURN_ROUNDS`` and ``RDZV_ETCD_CHURN_SEED``.
"""
