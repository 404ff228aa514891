"""An etcd of our own, so that a newcomer needs none: ``--rdzv-conf=embed=1``.

The node on the machine that the endpoint names starts it; it outlives that node and stops by
itself when no node has used it for a while.

    start.py       decides whether to start, wait or refuse (the only public part)
    cluster_start.py  the same for a cluster of three
    launch.py      starts a supervisor
    binary.py      where the etcd executable is
    port.py        what answers at an address, and whose it is
    supervisor.py  the detached process that keeps etcd and ends it; a program of its own
    cluster.py     what it does for one seat of a cluster
    seat.py        what a seat does next: pure decisions, and why they are safe
    child.py       its etcd: command line, certificates, data folder, requests
    request.py     one HTTP request within a time limit
    program.py     a process and all that it starts, signals, and one supervisor per port

Nothing is imported here: the supervisor loads no more than it needs.
"""
