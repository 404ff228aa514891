"""What is imported before participants are forked; starts no thread, opens no channel."""

import grpc.aio  # noqa: F401
import torch.distributed.elastic.agent.server.api
import torch.distributed.elastic.rendezvous.etcd_rendezvous
import torch.distributed.elastic.rendezvous.etcd_rendezvous_backend  # noqa: F401

import rdzv_etcd.etcd.client
import rdzv_etcd.torch_plugin.handler  # noqa: F401
