"""What is in etcd, and every decision about it: pure; no I/O, no clock, no randomness."""
