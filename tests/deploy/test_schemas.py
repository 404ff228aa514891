"""Kubernetes' and Kubeflow's published schemas accept the manifests, and refuse unknown fields."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.examples import MANIFESTS, documents, pod_templates

_SCHEMAS: Any = importlib.import_module("kubernetes_validate")  # neither has type hints
VERSIONS = ("1.29", str(_SCHEMAS.latest_version()))
"""Of Kubernetes: the oldest that may still be around, and the newest that is known here."""
_MODELS, _TRAINER = "kubeflow.training.models", "kubeflow_trainer_api.models"
"""Imported by who needs them: they take a second each, in every process that runs tests."""
_PLAIN = {"str": str, "int": int, "bool": bool}

OBJECTS = [
    pytest.param(item, id=f"{path.name}-{item['kind']}-{item['metadata']['name']}")
    for path in MANIFESTS
    for item in documents(path)
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("item", OBJECTS)
def test_the_schema_accepts_the_manifest(item: dict[str, Any], version: str) -> None:
    check_object(item, version)


@pytest.mark.parametrize("item", OBJECTS)
def test_the_schema_refuses_an_unknown_field(item: dict[str, Any]) -> None:
    """So that the test above means something."""
    spoilt = copy.deepcopy(item)
    spoilt["spec"]["sepcial"] = 1
    with pytest.raises((_SCHEMAS.ValidationError, AssertionError), match="sepcial"):
        check_object(spoilt, VERSIONS[-1])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_pod_mounts_the_volumes_it_has(path: Path) -> None:
    """No schema checks this."""
    for item in documents(path):
        claims = [c["metadata"]["name"] for c in item["spec"].get("volumeClaimTemplates", ())]
        for pod in (template["spec"] for template in pod_templates(item)):
            has = {volume["name"] for volume in pod.get("volumes", ())} | set(claims)
            mounted = {m["name"] for c in pod["containers"] for m in c.get("volumeMounts", ())}
            assert mounted == has


def test_selectors_match() -> None:
    for path in MANIFESTS:
        for item in documents(path):
            if item["kind"] == "StatefulSet":
                labels = item["spec"]["template"]["metadata"]["labels"]
                assert item["spec"]["selector"]["matchLabels"] == labels
                assert item["spec"]["serviceName"] in {
                    other["metadata"]["name"]
                    for other in documents(path)
                    if other["kind"] == "Service" and other["spec"]["selector"] == labels
                }


def check_object(item: dict[str, Any], version: str) -> None:
    """Raise unless the object has all fields it needs, and no field that is not known."""
    if item["apiVersion"] == "kubeflow.org/v1":
        _check_model(item, f"KubeflowOrgV1{item['kind']}", version, item["kind"])
    elif item["apiVersion"] == "trainer.kubeflow.org/v1alpha1":
        model = _imported(_TRAINER).TrainerV1alpha1TrainJob
        assert model.from_dict(item).to_dict() == item  # it leaves out what it does not know
    else:
        _SCHEMAS.validate(item, version, strict=True)


def _check_model(value: Any, kind: str, version: str, where: str) -> None:
    """Check along the types that Kubeflow's SDK was generated with, from the operator's API."""
    if kind in _PLAIN:
        assert type(value) is _PLAIN[kind], f"{where} is {value!r}, which is no {kind}"
    elif match := re.fullmatch(r"list\[(\w+)\]", kind):
        for index, part in enumerate(value):
            _check_model(part, match[1], version, f"{where}[{index}]")
    elif match := re.fullmatch(r"dict\(str, (\w+)\)", kind):
        for name, part in value.items():
            _check_model(part, match[1], version, f"{where}.{name}")
    elif kind == "V1PodTemplateSpec":
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}}
        _SCHEMAS.validate({**template, "template": value}, version, strict=True)
    elif kind == "V1ObjectMeta":
        holder = {"apiVersion": "v1", "kind": "Secret", "metadata": value}
        _SCHEMAS.validate(holder, version, strict=True)
    else:
        model = getattr(_imported(_MODELS), kind)
        names = {typed: name for name, typed in model.attribute_map.items()}
        for typed, part in value.items():
            assert typed in names, f"{where} has no field {typed}"
            _check_model(part, model.openapi_types[names[typed]], version, f"{where}.{typed}")
        model(**{names[typed]: part for typed, part in value.items()})  # raises if one is missing


def test_the_examples_are_plain_yaml() -> None:
    """No anchors and tags: what kubectl reads is what is written."""
    for path in MANIFESTS:
        for token in yaml.scan(path.read_text(encoding="utf-8")):
            assert not isinstance(token, yaml.AnchorToken | yaml.AliasToken | yaml.TagToken)


def _imported(models: str) -> Any:
    return importlib.import_module(models)
