"""``python -m rdzv_etcd``: the same as the command ``rdzv-etcd``."""

from __future__ import annotations

import sys

from rdzv_etcd.cli import main

if __name__ == "__main__":
    sys.exit(main())
