"""Authentication: tokens that expire every two seconds are never seen by the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from rdzv_etcd.errors import EtcdAuthError, EtcdPermissionError, SettingsError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Delete, Get, Put, Txn
from rdzv_etcd.settings import settings_from_config
from rdzv_etcd.settings.connection import Credentials
from tests.etcd.tools import END, PREFIX, InOrder, client_of, in_background, put, soon
from tests.support.servers import USER, USER_PASSWORD, EtcdServer

pytestmark = pytest.mark.every_etcd

TRAINER = Credentials(USER, USER_PASSWORD)
TOKEN_TTL_S = 2.0


async def outlive_the_token() -> None:
    await asyncio.sleep(TOKEN_TTL_S + 1.5)  # etcd looks for expired tokens once a second


async def test_an_expired_token_is_renewed_on_calls(auth_etcd: EtcdServer) -> None:
    async with client_of(auth_etcd, credentials=TRAINER) as client:
        lease = await client.grant(60)
        await outlive_the_token()
        renewal = asyncio.create_task(client.keep_alive(lease.lease_id))
        calls = [client.txn(put(b"auth%d" % n, b"", lease.lease_id)) for n in range(20)]
        assert all(done.succeeded for done in await asyncio.gather(*calls))
        assert await renewal == 60
        assert await client.revoke(lease.lease_id)


@pytest.mark.slow
async def test_an_expired_token_is_renewed_on_streams(
    fresh_etcd: Callable[..., EtcdServer],
) -> None:
    """The streams are opened again after a restart, long after the token has expired."""
    server = fresh_etcd(flags=("--auth-token-ttl", "2"))
    server.enable_auth()
    async with client_of(server, credentials=TRAINER) as client:
        lease = await client.grant(60)
        first = await client.txn(put(b"1", b"", lease.lease_id))
        watch = client.watch(PREFIX, END, start_revision=first.revision)
        assert (await soon(watch.__anext__())).revision == first.revision
        assert await client.keep_alive(lease.lease_id) == 60
        await outlive_the_token()
        await in_background(server.restart)
        assert await client.keep_alive(lease.lease_id) > 0
        second = await client.txn(put(b"2", b"", lease.lease_id), repeatable=True)
        assert (await soon(watch.__anext__())).revision <= second.revision
        late = client.watch(PREFIX, END, start_revision=first.revision)
        await outlive_the_token()
        other = client.watch(PREFIX, END, start_revision=first.revision)
        for one in (late, other):
            assert (await soon(one.__anext__())).revision >= first.revision


async def test_a_change_of_roles_is_survived(server: EtcdServer) -> None:
    """Every change of users or roles makes etcd refuse the tokens issued before."""
    server.enable_auth()
    async with client_of(server, credentials=TRAINER) as client:
        await client.txn(put(b"1"))
        for n in range(3):
            grant = partial(server.gateway.grant_prefix, "trainers", b"/more%d/" % n)
            await in_background(grant)
            calls = [client.txn(put(b"role%d" % m)) for m in range(5)]
            assert all(done.succeeded for done in await asyncio.gather(*calls))


async def test_authentication_switched_on_later_is_survived(server: EtcdServer) -> None:
    async with client_of(server, credentials=TRAINER) as client:
        assert (await client.txn(put(b"open"))).succeeded  # credentials do no harm
        await in_background(server.enable_auth)
        assert (await client.txn(put(b"guarded"))).succeeded


@pytest.mark.parametrize(
    "wrong",
    [
        Credentials(USER, "not it"),
        Credentials("nobody", "at all"),
        Credentials(USER, ""),
        Credentials("", ""),
    ],
)
async def test_a_wrong_password_is_reported_without_a_retry(
    auth_etcd: EtcdServer, wrong: Credentials
) -> None:
    async with client_of(auth_etcd, credentials=wrong) as client:
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(EtcdAuthError) as refused:
            await client.connect()
        assert asyncio.get_running_loop().time() - started_s < 20  # of 30 allowed
        assert not wrong.password or wrong.password not in str(refused.value)
        assert f"{auth_etcd.endpoint}, as user {wrong.user!r}: " in str(refused.value)
        with pytest.raises(EtcdAuthError):
            await soon(client.watch(PREFIX, start_revision=1).__anext__())
        with pytest.raises(EtcdAuthError):
            await client.keep_alive(1)


async def test_missing_credentials_are_reported(auth_etcd: EtcdServer) -> None:
    async with client_of(auth_etcd) as client:
        with pytest.raises(EtcdAuthError, match="no user and password are configured"):
            await client.connect()
        with pytest.raises((EtcdAuthError, EtcdPermissionError)):
            await soon(client.watch(PREFIX, start_revision=1).__anext__())


async def test_a_limited_user_makes_contact_and_learns_what_is_forbidden(
    auth_etcd: EtcdServer,
) -> None:
    async with client_of(auth_etcd, credentials=TRAINER) as client:
        await client.connect()
        await client.get(Get(PREFIX, END))
        subject = f"{auth_etcd.endpoint}, as user '{USER}': "
        for call, what in (
            (client.txn(Txn((), (Put(b"/elsewhere", b""),))), "write '/elsewhere'"),
            (client.txn(Txn((), (), (Delete(b"/a/", b"/a0"),))), "delete all under '/a/'"),
            (client.get(Get(b"/a", b"/c")), "read '/a' up to '/c'"),
            (client.watch(b"/elsewhere", start_revision=1).__anext__(), "watch '/elsewhere'"),
        ):
            with pytest.raises(EtcdPermissionError) as denied:
                await soon(call)
            assert str(denied.value).startswith(subject)
            assert str(denied.value).endswith(f": {what}")


def test_a_password_over_plain_http_is_refused_unless_only_this_machine_can_read_it() -> None:
    login = {"RDZV_ETCD_USER": "ann", "RDZV_ETCD_PASSWORD": "s3cret"}

    def make(endpoint: str, environ: dict[str, str] = login, **config: object) -> None:
        settings = settings_from_config(
            endpoint=endpoint,
            job_id="job",
            min_nodes=1,
            max_nodes=1,
            local_addr=None,
            config=config,
            environ=environ,
        )
        EtcdClient(settings.connection, InOrder())

    for endpoint in ("10.1.2.3", "http://localhost,http://10.1.2.3", "[2001:db8::7]:2379"):
        wanted = r"plain text.*https://.*allow_plain_password=1"
        with pytest.raises(SettingsError, match=wanted) as refused:
            make(endpoint)
        message = str(refused.value)
        assert "http://10.1.2.3:2379" in message or "http://[2001:db8::7]:2379" in message
        assert "s3cret" not in message
        make(endpoint, allow_plain_password="1")
        make(endpoint, environ={})
    for endpoint in ("localhost", "127.0.0.1:2379", "127.1", "[::1]", ""):
        make(endpoint)
    make("https://10.1.2.3")
    make("10.1.2.3", protocol="https")
