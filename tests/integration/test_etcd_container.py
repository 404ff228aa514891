"""``rdzv_etcd.testing.EtcdContainer``, used as its documentation says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rdzv_etcd import Group, settings_from_config


def test_a_group_joins_through_a_container(etcd_image: str, job_id: str) -> None:
    from rdzv_etcd.testing import EtcdContainer  # noqa: PLC0415 - needs testcontainers

    with EtcdContainer(etcd_image) as etcd:
        assert etcd.get_connection_url() == f"http://{etcd.endpoint}"
        settings = settings_from_config(
            endpoint=etcd.endpoint,
            job_id=job_id,
            min_nodes=1,
            max_nodes=1,
            local_addr=None,
            config={},
            environ={},
        )
        with Group(settings) as group:
            assert group.join().size == 1
            assert group.finish("done")


def test_the_image_may_come_from_the_environment(
    etcd_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rdzv_etcd.testing import EtcdContainer  # noqa: PLC0415 - needs testcontainers

    monkeypatch.setenv("ETCD_IMAGE", etcd_image)
    assert EtcdContainer().image == etcd_image
    assert EtcdContainer("other").image == "other"


def test_the_other_tools_do_not_need_testcontainers() -> None:
    code = "import sys, rdzv_etcd.testing; assert 'testcontainers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
