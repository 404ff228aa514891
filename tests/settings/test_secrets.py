"""Secrets: from the environment, from files and pipes, and never in a message."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rdzv_etcd import log
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Credentials, secrets
from rdzv_etcd.settings.fields import MAX_SECRET
from rdzv_etcd.settings.secrets import read_again, read_secret
from rdzv_etcd.trust import make_certificates
from tests.settings.tools import refused, settings
from tests.support.hung_disk import hung_folder
from tests.support.processes import run


@pytest.mark.parametrize("name", ["user", "password", "username", "PASSWORD"])
def test_secrets_as_values_are_refused_without_being_repeated(name: str) -> None:
    message = refused("RDZV_ETCD_USER and RDZV_ETCD_PASSWORD", **{name: "s3cret"})
    assert "s3cret" not in message
    assert "password_file=" in message


def test_credentials_come_from_the_environment_or_files(tmp_path: Path) -> None:
    variables = {"RDZV_ETCD_USER": "ann", "RDZV_ETCD_PASSWORD": "s3cret"}
    made = settings(endpoint="localhost", environ=variables)
    assert made.connection.credentials == Credentials("ann", "s3cret")
    assert "s3cret" not in repr(made)
    with_newlines = {name: f"{value}\r\n" for name, value in variables.items()}
    assert settings(endpoint="localhost", environ=with_newlines).connection == made.connection
    refused("not text", environ={**variables, "RDZV_ETCD_PASSWORD": "s3\ncret"})
    (tmp_path / "user").write_text("bob\n")
    (tmp_path / "password").write_text(" with spaces \r\n")
    files: dict[str, Any] = {
        "user_file": tmp_path / "user",
        "password_file": str(tmp_path / "password"),
    }
    made = settings(endpoint="localhost", environ=variables, **files)
    assert made.connection.credentials == Credentials("bob", " with spaces ")
    (tmp_path / "password").write_text("\n")
    refused("password_file=.* is empty", **files)
    (tmp_path / "password").write_bytes(b"\xff")
    refused("not UTF-8", **files)
    refused("without a password: set RDZV_ETCD_PASSWORD", environ={"RDZV_ETCD_USER": "ann"})
    refused("without a user: set RDZV_ETCD_USER", environ={"RDZV_ETCD_PASSWORD": "x"})


def test_a_password_from_a_pipe_is_read_once_and_kept(tmp_path: Path) -> None:
    """``password_file=<(command)`` makes such a path; ``mkfifo`` makes one with a name."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as command:
        command.write("s3cret\n")
    (tmp_path / "user").write_text("ann")
    files: dict[str, Any] = {
        "user_file": tmp_path / "user",
        "password_file": f"/dev/fd/{reader}",
    }
    try:
        for _ in range(2):  # and again, for the next handler of the process
            credentials = settings(endpoint="localhost", **files).connection.credentials
            assert credentials == Credentials("ann", "s3cret")
            assert credentials is not None
            assert read_again(credentials) == credentials
    finally:
        os.close(reader)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_FIRST_S", (0.1, 600.0))
    monkeypatch.setattr(secrets, "_LIMIT_S", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("written", ["", "half of i"])
def test_a_pipe_that_is_never_closed_is_given_up(
    written: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "password"
    os.mkfifo(pipe)
    both_ends = os.open(pipe, os.O_RDWR)
    os.write(both_ends, written.encode())
    message = r"password_file=.*/password' .* in 0.2 s: it is a pipe"
    try:
        with pytest.raises(SettingsError, match=message):
            read_secret(pipe, "password_file")
    finally:
        os.close(both_ends)
    (warning,) = caplog.messages
    assert str(pipe) in warning
    assert "half" not in warning


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("option", ["password_file", "ca_cert"])
def test_a_file_on_a_file_system_that_hangs_is_given_up(
    option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"RDZV_ETCD_USER": "ann"} if option == "password_file" else {}
    path = tmp_path / "mounted" / "file"
    path.parent.mkdir()
    with hung_folder(path.parent):
        refused(
            f"{option}=.*/file' could not be read in 0.2 s: its file system does not answer",
            endpoint="https://localhost",
            environ=environ,
            **{option: path},
        )
    (warning,) = caplog.messages
    assert f"for {option}={str(path)!r}: its file system does not answer" in warning


def test_a_pipe_that_is_written_late_is_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "password"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read_secret, pipe, "password_file")
        with pipe.open("w") as command:  # blocks until it is read
            command.write("s3c")
            command.flush()
            command.write("ret\n")
        assert reading.result() == "s3cret"
    assert read_secret(pipe, "password_file") == "s3cret"


def test_a_file_that_can_be_no_secret_is_not_read_to_its_end(tmp_path: Path) -> None:
    large = tmp_path / "password"
    large.write_bytes(b"x" * MAX_SECRET)
    assert len(read_secret(large, "password_file")) == MAX_SECRET
    large.write_bytes(b"x" * 10_000_000)
    refused("password_file=.*/password' is larger than .*16384", password_file=large)
    refused("user_file='/dev/zero' is a device", user_file="/dev/zero")
    refused("user_file='/' cannot be read: Is a directory", user_file="/")


def test_a_file_that_has_become_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Leases would not be kept meanwhile."""
    (tmp_path / "password").write_text("first\n")
    os.mkfifo(tmp_path / "user")
    for credentials in (
        Credentials("ann", "first", tmp_path / "user", None),
        Credentials("ann", "first", None, tmp_path / "user"),
    ):
        with pytest.raises(SettingsError, match=r"_file=.*/user' is a pipe now"):
            read_again(credentials)


def test_a_password_in_a_file_is_read_again(tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "user_file": tmp_path / "user",
        "password_file": tmp_path / "password",
    }
    files["user_file"].write_text("ann\n")
    files["password_file"].write_text("first\n")
    credentials = settings(endpoint="localhost", **files).connection.credentials
    assert credentials is not None
    files["password_file"].write_text("second\n")
    assert read_again(credentials) == Credentials("ann", "second")
    files["password_file"].unlink()
    with pytest.raises(SettingsError, match=r"password_file=.* cannot be read"):
        read_again(credentials)


_WITH_A_SECRET = """
from tests.settings.tools import settings
settings(environ={"RDZV_ETCD_EMBED_SECRET": 16 * "x"})
"""
_WITHOUT_CRYPTOGRAPHY = f"import sys; sys.modules['cryptography'] = None{_WITH_A_SECRET}"
_WITHOUT_MORE_FILES = f"""
from rdzv_etcd.trust import make_certificates; make_certificates(16 * "x")
import encodings.idna, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
{_WITH_A_SECRET}
"""
_FIPS_MODE = """
openssl_conf = init
[init]
alg_section = algorithms
[algorithms]
default_properties = fips=yes
"""


def test_an_embedded_etcds_secret_becomes_certificates(tmp_path: Path) -> None:
    secret = "staple-battery-horse"
    made = settings(environ={"RDZV_ETCD_EMBED_SECRET": f"{secret}\n"}).connection
    assert made.tls is not None
    assert str(made) == "https://h1:2379"
    assert secret not in repr(made)
    assert "PRIVATE KEY" not in repr(make_certificates(secret))
    file = tmp_path / "secret"
    file.touch(0o640)  # as a Kubernetes Secret's, with an fsGroup
    file.write_text(f"{secret}\n")
    given = settings(endpoint="https://h1", embed_secret_file=file).connection
    assert (given.secret, given.tls) == (secret, made.tls)


@pytest.mark.parametrize(
    ("program", "openssl", "why"),
    [
        (
            _WITHOUT_CRYPTOGRAPHY,
            "",
            r"takes the package cryptography.*pip install 'rdzv-etcd\[embed",
        ),
        (
            _WITH_A_SECRET,
            _FIPS_MODE,
            "OpenSSL refuses scrypt, perhaps in FIPS mode.*use an etcd",
        ),
        (_WITHOUT_MORE_FILES, "", r"be kept in memory \(.*Too many open files\): allow memfd_crea"),
    ],
    ids=["no package", "FIPS", "no more files"],
)
def test_a_system_that_cannot_make_or_keep_certificates_is_named(
    tmp_path: Path, program: str, openssl: str, why: str
) -> None:
    conf = tmp_path / "openssl.cnf"
    conf.write_text(openssl)
    environ = {"OPENSSL_CONF": str(conf)}
    done = run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], env=environ)
    assert re.search(f"SettingsError: .*{why}", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"fifteen-letters", 0o600, "has 15 characters, and must have at least 16.*openssl rand"),
        (b"\n", 0o600, "is empty"),
        (b"sixteen letters\xff", 0o600, "is not UTF-8"),
        (
            b"sixteen letters and more",
            0o604,
            "every user of this machine .mode 0604.: `chmod 600 '",
        ),
        (
            b"sixteen letters and more",
            0o602,
            "every user of this machine .mode 0602.: `chmod 600 '",
        ),
    ],
)
def test_a_secret_that_keeps_nobody_out_is_refused(
    tmp_path: Path, content: bytes, mode: int, why: str
) -> None:
    file = tmp_path / "a secret"
    file.write_bytes(content)
    file.chmod(mode)
    message = refused(f"embed_secret_file='{file}' .*{why}", embed_secret_file=file)
    assert "letters" not in message


def test_what_is_judged_of_a_secrets_file_is_what_was_read(tmp_path: Path) -> None:
    pipe = tmp_path / "secret"
    os.mkfifo(pipe, 0o600)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(settings, embed_secret_file=pipe)
        with pipe.open("w") as file:  # it is open for reading as well now
            pipe.unlink()
            file.write("staple-battery-horse")
    assert reading.result().connection.secret == "staple-battery-horse"


def test_a_secret_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    name, secret = "RDZV_ETCD_EMBED_SECRET", "staple-battery-horse"
    refused(f"{name} has 0 characters", environ={name: ""})
    refused(f"{name} has characters that are not text", environ={name: "staple\nbattery-horse"})
    refused(f"set {name} in the environment, or give embed_secret_file=", embed_secret=secret)
    refused("embed_secret_file=.* cannot be read", embed_secret_file=tmp_path / "none")
    refused("http given together with the secret", endpoint="http://h1", environ={name: secret})
    cert = tmp_path / "cert"
    cert.touch()
    refused(f"cert given together with the secret.*{name}", cert=cert, environ={name: secret})
