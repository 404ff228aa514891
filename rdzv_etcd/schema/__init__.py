"""The only owner of key paths and value encoding; no I/O."""
