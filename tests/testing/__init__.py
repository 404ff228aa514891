"""Tests of the public test tools: the in-memory etcd's faults and the simulated event loop."""
