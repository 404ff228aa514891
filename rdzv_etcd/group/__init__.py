"""Drives one node through its rounds: threads, session, watches; no torch, no grpc."""
