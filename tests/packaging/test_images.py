"""The images and the commands to build them that files and documents name."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.images import ETCD_IMAGE, NODE_IMAGE

ROOT = Path(__file__).parents[2]
_DOCUMENT = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
_TEXTS = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("docker-compose.yml", "examples/deploy/etcd.yaml")
}


def test_every_etcd_image_is_one_that_etcd_publishes() -> None:
    """Tags are releases, ``v3.6.6``: there are none such as ``3.6``.

    Source: https://github.com/etcd-io/etcd/releases, "Docker" of each release.
    """
    published = r"(gcr\.io/etcd-development|quay\.io/coreos)/etcd:v3\.\d+\.\d+"
    for name, text in _TEXTS.items():
        named = re.findall(r"\w[\w.-]*\.(?:io|com)/[\w./-]*etcd:[\w.-]+", text)
        assert named, name
        assert [image for image in named if not re.fullmatch(published, image)] == []


def test_all_places_name_the_same_etcd() -> None:
    named = {
        name: set(re.findall(r"etcd-development/etcd:(v[\w.]+)", text))
        for name, text in _TEXTS.items()
    }
    (compose, deploy) = named.values()
    assert compose == deploy
    assert len(compose) == 1


def test_an_index_is_named_beside_the_one_that_has_the_other_packages() -> None:
    (arguments,) = re.findall(r'PIP_ARGS="([^"]*)" docker compose build', _DOCUMENT)
    assert arguments.startswith("--extra-index-url https://")
    for name in ("Dockerfile", "docs/deploy.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "--extra-index-url" in text


def test_the_way_without_a_registry_is_written_down() -> None:
    assert "-m tests.integration.images" in _DOCUMENT
    assert f"ETCD_IMAGE={ETCD_IMAGE} NODE_IMAGE={NODE_IMAGE} docker compose up" in _DOCUMENT
