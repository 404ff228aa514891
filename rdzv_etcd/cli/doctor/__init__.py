"""``rdzv-etcd doctor``: looks for what can be wrong, and names it.

    facts.py          what was found out; plain values
    gather.py         finds it out: every read, look-up and connection there is
    pages.py          what an etcd tells over HTTP: version, alarms, quota
    checks_etcd.py, checks_job.py, checks_host.py   facts -> findings; pure
    command.py        the command

A new check is a function of the facts in one of the lists there.
"""

from rdzv_etcd.cli.doctor.command import doctor

__all__ = ["doctor"]
