"""The kinds of faults and settings that a wide life draws some of."""

from __future__ import annotations

SETTINGS = (
    "closed_ttl",
    "ended_ttl",
    "after_end",
    "job_lease_ttl",
    "last_call_timeout",
    "settle",
    "rejoin_timeout",
    "join_timeout",
    "rank_keys",
    "lease_ttls",
)
"""Drawn instead of fixed; rank keys and the TTLs of leases for each node."""

DEAF = ("stall_control", "stall_nodes", "stall_presence", "hang_member")
"""What ends only if the node finds out; also of :data:`NODES`."""

NODES = (
    *DEAF,
    "lag_watches",
    "cut_for_long",
    "repeat_late",
    "stop_slowly",
    "refuse_a_return",
    "start_a_stranger",
    "evict",
    "die_at_work",
    "stall",
    "finish_early",
    "suspend",
    "suspend_together",
)
"""See :mod:`tests.sim.faults_nodes`."""

ETCD = ("overload",)
"""See :mod:`tests.sim.faults_etcd`."""

OPERATOR = (
    "revoke_all",
    "extend_leases",
    "delete_a_presence",
    "delete_a_control_key",
    "delete_everything",
    "restore_a_backup",
    "lose_the_tail",
    "write_nonsense",
    "overwrite_a_slice",
    "edit_the_role",
    "ask_to_leave",
    "lose_data_between_runs",
)
"""See :mod:`tests.sim.faults_operator`."""

PEERS = (
    "kill_processes",
    "break_links",
    "refuse_links",
    "cut_links",
    "accept_for_the_dead",
)
"""See :mod:`tests.sim.faults_peers`. Nodes have links in lives that draw any of these."""

JOBS = ("neighbour",)
"""Another job on the same etcd."""

WORK = ("interrupted_calls",)
"""What workers do besides: see :mod:`tests.sim.work` and :mod:`tests.sim.interruptions`."""

RACKS = "racks"
"""Nodes are in racks, and worlds are made of segments of these."""
OFTEN = (RACKS,)
"""Drawn in every fourth life, whatever else it draws."""

KINDS = (*SETTINGS, *NODES, *OPERATOR, *PEERS, *JOBS, *WORK, *ETCD, *OFTEN)
