"""An etcd in a container, for your own tests; needs ``testcontainers`` and an engine.

    with EtcdContainer() as etcd:
        rdzv_etcd.connect(etcd.endpoint, job="my-job", nodes=1)

Knows the container and etcd's health page; nothing of rendezvous.
"""

from __future__ import annotations

import os
from datetime import timedelta

from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import HttpWaitStrategy

IMAGE_VARIABLE = "ETCD_IMAGE"
DEFAULT_IMAGE = "gcr.io/etcd-development/etcd:v3.6.14"


class EtcdContainer(DockerContainer):
    """One etcd server that keeps its data in its container.

    ``image`` overrides ``$ETCD_IMAGE``, which overrides etcd's own. Other keywords are those of
    testcontainers' ``DockerContainer``. ``start`` (or entering ``with``) blocks until etcd's health
    page answers, which needs a leader and a read of the data, and raises :class:`TimeoutError`
    after ``startup_timeout_s``.
    """

    def __init__(
        self,
        image: str | None = None,
        *,
        port: int = 2379,
        startup_timeout_s: float = 60.0,
        **kwargs: object,
    ) -> None:
        image = image or os.environ.get(IMAGE_VARIABLE) or DEFAULT_IMAGE
        super().__init__(image, **kwargs)  # type: ignore[arg-type]
        self.port = port
        url = f"http://0.0.0.0:{port}"
        self.with_exposed_ports(port)
        # A list, so that nothing splits it; the image may have no shell and no entry point.
        command = ["etcd", "--data-dir=/tmp/etcd", "--log-level=warn"]
        command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        self.with_command(command)
        healthy = HttpWaitStrategy(port, "/health").with_poll_interval(0.1)
        self.waiting_for(healthy.with_startup_timeout(timedelta(seconds=startup_timeout_s)))

    @property
    def endpoint(self) -> str:
        """``host:port``, as for ``--rdzv-endpoint``."""
        return f"{self.get_container_host_ip()}:{self.get_exposed_port(self.port)}"

    def get_connection_url(self) -> str:
        """``http://host:port``."""
        return f"http://{self.endpoint}"
