"""An etcd in a container, for your own tests; needs ``testcontainers`` and an engine.

    with EtcdContainer() as etcd:
        rdzv_etcd.connect(etcd.endpoint, job="my-job", nodes=1)

Follows testcontainers' conventions. Knows the container and etcd's health page; nothing of
rendezvous.
"""

from __future__ import annotations

import http.client
import os
import time

from testcontainers.core.container import DockerContainer

IMAGE_VARIABLE = "ETCD_IMAGE"
DEFAULT_IMAGE = "gcr.io/etcd-development/etcd:v3.6.14"

_POLL_S = 0.1


class EtcdContainer(DockerContainer):
    """One etcd server that keeps its data in its container.

    ``image`` beats ``$ETCD_IMAGE``, which beats etcd's own. Other keywords are those of
    testcontainers' ``DockerContainer``. ``start`` (or entering ``with``) blocks until etcd is
    healthy, and raises :class:`TimeoutError` with the server's log after ``startup_timeout_s``.
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
        self.startup_timeout_s = startup_timeout_s
        url = f"http://0.0.0.0:{port}"
        self.with_exposed_ports(port)
        # A list, so that nothing splits it; the image may have no shell and no entry point.
        command = ["etcd", "--data-dir=/tmp/etcd", "--log-level=warn"]
        command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        self.with_command(command)

    def start(self) -> EtcdContainer:
        """Start the container and wait until etcd is healthy."""
        super().start()
        deadline = time.monotonic() + self.startup_timeout_s
        while not self._is_healthy():
            if time.monotonic() > deadline:
                stdout, stderr = self.get_logs()
                self.stop()
                raise TimeoutError(
                    f"etcd ({self.image}) was not healthy within {self.startup_timeout_s:g} s: "
                    f"{(stdout + stderr).decode(errors='replace')[-2000:]}"
                )
            time.sleep(_POLL_S)
        return self

    @property
    def endpoint(self) -> str:
        """``host:port``, as for ``--rdzv-endpoint``."""
        return f"{self.get_container_host_ip()}:{self.get_exposed_port(self.port)}"

    def get_connection_url(self) -> str:
        """``http://host:port``."""
        return f"http://{self.endpoint}"

    def _is_healthy(self) -> bool:
        """Ask the health page, which needs a leader and a read of the data."""
        connection = http.client.HTTPConnection(self.endpoint, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # not listening yet
            return False
        finally:
            connection.close()
