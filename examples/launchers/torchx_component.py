"""torchx: its own ``dist.ddp`` with ``--rdzv_backend etcd3``, and a component that passes it all.

    torchx run -s local_cwd dist.ddp --rdzv_backend etcd3 --rdzv_port 2379 -j 2x2 --script train.py

``dist.ddp`` takes the backend's name and a port, and looks for etcd on the host of its replica 0
(``localhost`` where the scheduler names none). Options of the backend go by the environment:
``--env PET_RDZV_CONF=embed=1`` lets that replica start an etcd there. The component below takes an
etcd of your own, anywhere, and every option:

    torchx run -s local_cwd examples/launchers/torchx_component.py:ddp \\
        --etcd etcd-1:2379,etcd-2:2379 --conf lease_ttl=5 -j 2x2 --script train.py
"""

# Annotations stay as they are: torchx reads them.
from torchx import specs
from torchx.components.dist import parse_nnodes


def ddp(
    *script_args: str,
    script: str,
    etcd: str,
    conf: str = "",
    image: str = ".",
    name: str = "ddp",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    j: str = "1x2",
    max_restarts: int = 3,
) -> specs.AppDef:
    """torchrun with rendezvous on etcd v3.

    Args:
        script_args: arguments of the script
        script: what each worker runs
        etcd: endpoints of etcd
        conf: options of the backend, as in --rdzv-conf
        image: of the container, or the folder
        name: of the job
        cpu: per node
        gpu: per node
        memMB: per node
        j: [{fewest nodes}:]{nodes}x{workers per node}
        max_restarts: how often workers are restarted
    """
    fewest, most, workers, nodes = parse_nnodes(j)
    command = ["-m", "torch.distributed.run", "--rdzv-backend=etcd3", f"--rdzv-endpoint={etcd}"]
    command += [f"--rdzv-id={specs.macros.app_id}", f"--rdzv-conf={conf}", f"--nnodes={nodes}"]
    command += [f"--nproc-per-node={workers}", f"--max-restarts={max_restarts}"]
    role = specs.Role(
        name="node",
        image=image,
        min_replicas=fewest,
        num_replicas=most,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB),
        entrypoint="python",
        args=[*command, script, *script_args],
    )
    return specs.AppDef(name=name, roles=[role])
