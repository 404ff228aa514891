"""What is imported before members are forked; starts no thread, opens no channel."""

import importlib

for name in (
    "grpc.aio",
    "rdzv_etcd.etcd.client",
    "rdzv_etcd.world.group",
    "rdzv_etcd.torch",
    "torch.distributed.elastic.utils.data",
    "torch._dynamo",  # the first optimizer of a process imports it, which takes more than a second
):
    importlib.import_module(name)
