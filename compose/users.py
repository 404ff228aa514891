"""Give etcd a root user, and a training user whose role is limited to rdzv-etcd's keys.

Settings come from the environment, see the service ``users`` in docker-compose.yml. Needs nothing
but the standard library: etcd's JSON gateway does what ``etcdctl user`` and ``etcdctl role`` do
(https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/). Does nothing if users are on already.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

PREFIX = "/rdzv_etcd/"
PREFIX_END = "/rdzv_etcd0"  # the first key after all that begin with the prefix: 0 follows /


def main() -> None:
    user = os.environ["RDZV_ETCD_USER"]
    root_password = os.environ["ROOT_PASSWORD"]
    if users_are_on(root_password):
        print("users are on already")
        return
    post("auth/user/add", name="root", password=root_password)
    post("auth/role/add", name="root")
    post("auth/user/grant", user="root", role="root")
    post("auth/role/add", name=user)
    permission = {"permType": "READWRITE", "key": coded(PREFIX), "range_end": coded(PREFIX_END)}
    post("auth/role/grant", name=user, perm=permission)
    post("auth/user/add", name=user, password=os.environ["RDZV_ETCD_PASSWORD"])
    post("auth/user/grant", user=user, role=user)
    post("auth/enable")
    print(f"users are on; {user} may read and write {PREFIX}")


def users_are_on(root_password: str) -> bool:
    try:
        post("auth/authenticate", name="root", password=root_password)
    except urllib.error.HTTPError as error:
        message = error.read().decode()
        if "authentication is not enabled" in message:
            return False
        raise SystemExit(f"etcd refuses root's password: {message}") from None
    return True


def post(path: str, **body: object) -> None:
    url = f"{os.environ['ETCD']}/v3/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode())
    folder = Path(os.environ["CERTIFICATES"])
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "client.pem", folder / "client-key.pem")
    with urllib.request.urlopen(request, context=context, timeout=30) as reply:
        reply.read()


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


if __name__ == "__main__":
    main()
