"""What no setting and no value that others wrote may exceed, and two defaults that others need."""

from __future__ import annotations

DEFAULT_PREFIX = "/rdzv_etcd"
DEFAULT_SLICE_NODES = 128
MAX_EPOCH_CLAIM = 2**53
"""No node may say that it knows of a higher epoch: microseconds until the year 2255, and exact in
every program that reads JSON."""
MAX_SLICE_NODES = 1024
"""More names in one value would not help anybody; etcd limits a request to 1.5 MiB."""
MAX_NODES = 1_000_000
"""More than any job has; every number in etcd that counts nodes is checked against it."""
MAX_ROUND = 10**9
"""Of a record. No round can follow that of this number: nobody could read it."""
MAX_HISTORY = 1000
"""Rounds: eight megabytes of etcd at most, and keys that the leader can read at once."""
MAX_ID = 1000
"""Characters of a job id and of a prefix: they are part of every key."""
MAX_RANK_KEY = 1000
"""Characters of a rank key: every node that leads reads all of them."""
MAX_DATA = 4096
"""Bytes of a node's data as JSON: every node that leads reads those of all."""
MAX_DATA_DEPTH = 32
"""Lists and dicts in each other in a node's data: how deep a reader can go is another's setting."""
MAX_HOST = 255
"""Characters of a host's name."""
MAX_REASON = 500
"""Characters of the reason why a node leaves or is drained, or a job is closed, that others see."""
MAX_SECRET = 16384
"""Bytes of the file that holds a user's name or password; it may be a token."""
