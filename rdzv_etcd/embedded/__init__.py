"""An etcd of our own, so that a newcomer needs none: ``--rdzv-conf=embed=1``.

The node on the machine that the endpoint names starts it; it outlives that node and stops by
itself when nobody has used it for a while.

    start.py       decides whether to start, wait or refuse (the only public part)
    addresses.py   which addresses are this machine's
    binary.py      where the etcd executable is
    probe.py       what answers at an address
    trust.py       whose it is, and whether it knows our password
    waiting.py     why nothing answers
    lock.py        one supervisor per port
    launch.py      starts the supervisor
    supervisor.py  the detached process that keeps etcd and ends it; a program of its own
    child.py       its etcd: command line, users, requests
    program.py     a process and all that it starts
    http.py, data_folder.py, signals.py, etcd_log.py   what these need
"""

from rdzv_etcd.embedded.start import StartedEtcd, ensure_etcd

__all__ = ["StartedEtcd", "ensure_etcd"]
