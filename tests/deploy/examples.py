"""The files under ``examples/deploy``, as the torchrun of each node that they would start.

Knows Kubernetes' variables and references, what Kubeflow's operator puts into a pod, and how to
get from a script the command that it would submit. Knows nothing of how torchrun reads it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.markdown import ROOT, Document

DOCUMENT = Document(ROOT / "docs" / "deploy.md")
EXAMPLES = ROOT / "examples" / "deploy"
FILES = sorted(path for path in EXAMPLES.iterdir() if path.is_file())
MANIFESTS = [path for path in FILES if path.suffix == ".yaml"]
SCRIPTS = [path for path in FILES if path.suffix in (".sbatch", ".sh")]
TRAINING = [path for path in FILES if path.name not in ("etcd.yaml", "network-policy.yaml")]

MOUNTED = "/etc/rdzv-etcd"
"""Where the examples expect the Secret (or files): ca.crt, tls.crt, tls.key, user, password."""
SLURM_JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "4", "SLURM_CPUS_PER_TASK": "16"}
SLURM_HOSTS = "gpu[07-10]"


@dataclass(frozen=True)
class Launch:
    """What one node runs, and the environment that its platform adds."""

    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def options(self) -> tuple[str, ...]:
        """The command without the program's name, which is torchrun's."""
        assert self.command[0] == "torchrun"
        return self.command[1:]

    def replaced(self, *replacements: tuple[str, str]) -> Launch:
        """Return the launch with texts replaced everywhere; each of them has to occur."""
        command, environment = self.command, dict(self.environment)
        for old, new in replacements:
            everything = [*command, *environment.values()]
            assert any(old in text for text in everything), f"{old} does not occur: {everything}"
            command = tuple(text.replace(old, new) for text in command)
            environment = {name: text.replace(old, new) for name, text in environment.items()}
        return Launch(command, environment)


def documents(path: Path) -> list[dict[str, Any]]:
    """Return all objects of one manifest."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def pod_templates(value: Any) -> list[dict[str, Any]]:
    """Return every pod template inside a manifest: a specification with containers, and its
    metadata."""
    if isinstance(value, list):
        return [found for part in value for found in pod_templates(part)]
    if not isinstance(value, dict):
        return []
    if "containers" in value.get("spec", ()):
        return [value]
    return [found for part in value.values() for found in pod_templates(part)]


def launch(path: Path, index: int, folder: Path) -> Launch:
    """Return what the node ``index`` of an example runs; ``folder`` is for scratch files."""
    if path in SCRIPTS:
        return _of_script(path, index, folder)
    (made,) = (_of_object(item, index) for item in documents(path) if item["kind"] in _POD_OF)
    return made


# --- Kubernetes -----------------------------------------------------------------------------------


def _of_object(item: dict[str, Any], index: int) -> Launch:
    pod = _POD_OF[item["kind"]](item, index)
    (container,) = pod.template["spec"]["containers"]
    environment = dict(_declared(container, pod.fields))
    environment.update(pod.added)  # the operator appends its own, and the last one counts
    words = [*container["command"], *container.get("args", ())]
    return Launch(tuple(expanded(word, environment) for word in words), environment)


@dataclass(frozen=True)
class _Pod:
    template: dict[str, Any]
    fields: Mapping[str, str]
    """What a ``fieldRef`` can name."""
    added: Mapping[str, str]
    """Variables that the manifest does not declare."""


def _indexed_pod(item: dict[str, Any], index: int) -> _Pod:
    assert item["spec"]["completionMode"] == "Indexed"
    uid = "1c2b8f6e-6d1c-4b6c-8a53-0d6d2f1f7b11"
    fields = {
        "metadata.name": f"{item['metadata']['name']}-{index}-x7k2p",
        "metadata.labels['batch.kubernetes.io/controller-uid']": uid,
    }
    return _Pod(item["spec"]["template"], fields, {"JOB_COMPLETION_INDEX": str(index)})


def _stateful_pod(item: dict[str, Any], index: int) -> _Pod:
    fields = {"metadata.name": f"{item['metadata']['name']}-{index}"}
    return _Pod(item["spec"]["template"], fields, {})


def _pytorch_pod(item: dict[str, Any], index: int) -> _Pod:
    """Variables as the operator sets them for a job with workers only.

    Source: kubeflow/training-operator, pkg/controller.v1/pytorch/{envvar,elastic}.go
    """
    spec, policy = item["spec"], item["spec"]["elasticPolicy"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]
    added = {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_RDZV_ENDPOINT": f"{policy['rdzvHost']}:{policy['rdzvPort']}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{c['key']}={c['value']}" for c in policy["rdzvConf"]),
    }
    fields = {"metadata.name": f"{item['metadata']['name']}-worker-{index}"}
    return _Pod(spec["pytorchReplicaSpecs"]["Worker"]["template"], fields, added)


def _trainer_pod(item: dict[str, Any], index: int) -> _Pod:
    """Variables as the torch plugin of Kubeflow Trainer sets them.

    Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go
    """
    trainer, name = item["spec"]["trainer"], item["metadata"]["name"]
    added = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29400",
        "JOB_COMPLETION_INDEX": str(index),
    }
    return _Pod({"spec": {"containers": [trainer]}}, {}, added)


_POD_OF: Mapping[str, Callable[[dict[str, Any], int], _Pod]] = {
    "Job": _indexed_pod,
    "PyTorchJob": _pytorch_pod,
    "StatefulSet": _stateful_pod,
    "TrainJob": _trainer_pod,
}


def _declared(container: dict[str, Any], fields: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable in container.get("env", ()):
        if "value" in variable:
            yield variable["name"], variable["value"]
        else:
            yield variable["name"], fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]


def expanded(word: str, environment: Mapping[str, str]) -> str:
    """Expand ``$(NAME)``; Kubernetes leaves an unknown name as it is, here it is an error."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word)


# --- scripts --------------------------------------------------------------------------------------

_STAND_INS = {
    # Each writes the command it is asked to run, NUL between the words. It takes no part in it.
    "srun": 'while [[ $1 == --* ]]; do shift; done; printf "%s\\0" "$@" >"$SUBMITTED"\n'
    'env --null | grep --null-data "^RDZV_ETCD_" >"$SUBMITTED.environment" || true',
    "runai": 'while [[ $1 != -- ]]; do shift; done; shift; printf "%s\\0" "$@" >"$SUBMITTED"',
    "scontrol": f'[[ "$*" == "show hostnames {SLURM_HOSTS}" ]] && printf "gpu%s\\n" 07 08 09 10',
}


def _of_script(path: Path, index: int, folder: Path) -> Launch:
    """Run the script itself, with programs in front of it that only write their arguments."""
    submitted = folder / "submitted"
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, line in _STAND_INS.items():
        program = programs / name
        program.write_text(f"#!/bin/bash\n{line}\n")
        program.chmod(0o755)
    allocation = {**SLURM_JOB, "SLURM_JOB_NODELIST": SLURM_HOSTS} if "slurm" in path.name else {}
    search = f"{programs}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", path],
        env={"PATH": search, "SUBMITTED": str(submitted), **allocation},
        check=True,
        timeout=60,
    )
    command = submitted.read_text().rstrip("\0").split("\0")
    if "slurm" in path.name:
        added = {**allocation, "SLURM_NODEID": str(index), "SLURM_PROCID": str(index)}
        inherited = Path(f"{submitted}.environment").read_text().rstrip("\0")
        added |= dict(line.split("=", 1) for line in inherited.split("\0") if line)
    else:  # Run:ai makes a PyTorchJob with a Master, whose variables the operator sets
        added = {"RANK": str(index), "WORLD_SIZE": "2", "PET_NNODES": "2"}
        added |= {"PET_NODE_RANK": str(index), "PET_MASTER_ADDR": "digits-master-0"}
    return Launch(tuple(command), added)
