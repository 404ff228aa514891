"""What the parts of one node share. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from rdzv_etcd.clock import Clock
from rdzv_etcd.core.model import Control
from rdzv_etcd.etcd.api import Etcd
from rdzv_etcd.group.feed import Feed
from rdzv_etcd.group.narrator import Narrator
from rdzv_etcd.group.pulse import Pulse
from rdzv_etcd.group.session import Session
from rdzv_etcd.schema.keys import JobKeys
from rdzv_etcd.settings import Settings


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a node is. ``node_id`` is ``<host>~<pid>~<random>``: unique, and readable in etcd."""

    node_id: str
    run_seed: str
    """Random; names the run if this node starts one."""

    @property
    def name(self) -> str:
        return self.node_id.split("~", 1)[0]


@dataclass(frozen=True, slots=True)
class NodeContext:
    """One node's connections and settings."""

    identity: Identity
    settings: Settings
    keys: JobKeys
    etcd: Etcd
    clock: Clock
    pulse: Pulse
    session: Session
    control: Feed[Control]
    narrator: Narrator
