"""The manifests' pods have no more rights, and are open to no more peers, than their work takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.examples import EXAMPLES, FILES, MANIFESTS, MOUNTED, documents, pod_templates

TEMPLATES = [
    pytest.param(template, id=path.name)
    for path in MANIFESTS
    for template in pod_templates(documents(path))
]
POLICIES = [
    item for path in MANIFESTS for item in documents(path) if item["kind"] == "NetworkPolicy"
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_nothing_runs_as_root_or_can_become_it(template: dict[str, Any]) -> None:
    spec = template["spec"]
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] > 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("template", TEMPLATES)
def test_secrets_are_readable_by_the_process_only(template: dict[str, Any]) -> None:
    secrets = [volume["secret"] for volume in template["spec"]["volumes"] if "secret" in volume]
    assert secrets
    assert {secret["defaultMode"] for secret in secrets} == {0o440}  # the group is fsGroup


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_policy_says_who_reaches_a_pod(template: dict[str, Any]) -> None:
    labels = template["metadata"]["labels"].items()
    chosen = [
        p["spec"] for p in POLICIES if p["spec"]["podSelector"]["matchLabels"].items() <= labels
    ]
    (policy,) = chosen
    assert policy["policyTypes"] == ["Ingress"]
    for rule in policy["ingress"]:
        assert rule["from"], "everybody may come in"


def test_nodes_reach_each_other_on_every_port() -> None:
    """Rank 0 listens on a free one in each round."""
    (policy,) = documents(EXAMPLES / "network-policy.yaml")
    (rule,) = policy["spec"]["ingress"]
    assert "ports" not in rule
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def test_the_policy_of_etcd_has_the_ports_that_it_listens_on() -> None:
    (policy,) = [item for item in POLICIES if item["metadata"]["name"] == "etcd"]
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    (container,) = _etcd()["containers"]
    assert opened == {port["containerPort"] for port in container["ports"]}


def test_etcd_s_metrics_are_not_on_all_addresses() -> None:
    """They are served without TLS and without asking who wants them."""
    (container,) = _etcd()["containers"]
    (flag,) = [word for word in container["command"] if word.startswith("--listen-metrics-urls=")]
    assert flag == "--listen-metrics-urls=http://$(POD_IP):2381"


def test_etcd_asks_for_client_certificates_and_every_example_has_one() -> None:
    (container,) = _etcd()["containers"]
    assert "--client-cert-auth" in container["command"]
    assert "--trusted-ca-file=/etc/etcd-tls/ca.crt" in container["command"]
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if f"{MOUNTED}/ca.crt" in text:
            found = re.findall(rf"\b(cert|key)(?:=|, value: ){MOUNTED}/(tls\.\w+)", text)
            assert found == [("cert", "tls.crt"), ("key", "tls.key")], path.name


def test_no_example_mounts_an_authority_s_key() -> None:
    for path in FILES:
        assert not re.search(r"\bca[-.]?key|ca\.key", path.read_text(encoding="utf-8")), path


def _etcd() -> dict[str, Any]:
    (template,) = pod_templates(documents(Path(EXAMPLES / "etcd.yaml")))
    spec: dict[str, Any] = template["spec"]
    return spec
