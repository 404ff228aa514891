"""``rdzv_etcd.torch`` with real processes, which are killed, stopped and added."""
