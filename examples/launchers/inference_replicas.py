"""An inference server of several replicas that know each other, and forget a dead one at once.

    python examples/launchers/inference_replicas.py etcd-host:2379 my-model --port 8000

Start one on every host. ``GET /`` asks whichever replica's turn it is, ``GET /replicas`` shows who
is known. A replica that is killed is out of the others' routing some 50 ms later: they hold
connections to each other ("peer links"). Requests are served all the time, also between two worlds.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import signal
import socket
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import rdzv_etcd
from rdzv_etcd.errors import EtcdError, JobClosedError, WorldOverError


class Routes:
    """Which replicas there are: node ids and URLs. Never changed, only replaced as a whole."""

    def __init__(self, url: str) -> None:
        self.replicas: dict[str, str] = {"me": url}
        self._turn = itertools.count()

    def drop(self, gone: set[str]) -> None:
        self.replicas = {one: url for one, url in self.replicas.items() if one not in gone}

    def next(self) -> str:
        urls = list(self.replicas.values())
        return urls[next(self._turn) % len(urls)]


def serve(host: str, port: int, url_host: str) -> tuple[str, Routes]:
    """Answer requests in threads of their own; return this replica's URL and its routes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/replicas":
                self.answer(json.dumps(sorted(routes.replicas.values())))
            elif self.path == "/infer":
                self.answer(f"inferred by {url}")  # stands for the model
            else:
                self.answer(self.ask_a_replica())

        def ask_a_replica(self) -> str:
            while True:
                chosen = routes.next()
                try:
                    with urllib.request.urlopen(f"{chosen}/infer", timeout=30) as answer:
                        return str(answer.read().decode())
                except (OSError, http.client.HTTPException):
                    if chosen == url:
                        raise
                    # It has died this very moment; the next one answers.

        def answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    url = f"http://{url_host}:{server.server_port}"
    routes = Routes(url)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return url, routes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", help="of etcd, such as etcd-1:2379,etcd-2:2379")
    parser.add_argument("job")
    parser.add_argument("--host", default=socket.gethostname(), help="where others reach it")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the end of `with` leaves the group
    url, routes = serve("", args.port, args.host)
    print(f"serving at {url}", flush=True)
    with rdzv_etcd.connect(
        args.endpoints,
        job=args.job,
        nodes=(1, 64),
        data={"url": url},
        local_addr=args.host,
        last_call_timeout=0.5,  # nobody waits long for others: they join later
    ) as group:
        for world in group.worlds():
            try:
                routes.replicas = {it.node_id: str(it.data["url"]) for it in world.members}
                print(f"{world.size} replicas", flush=True)
                world.wait_over()
            except (WorldOverError, JobClosedError, EtcdError):
                pass  # it serves on with what it knows, and the next pass waits for etcd
            change = world.change
            if isinstance(change, rdzv_etcd.Lost | rdzv_etcd.Left):
                routes.drop(set(change.members))
            print(f"over: {change}", flush=True)


if __name__ == "__main__":
    main()
