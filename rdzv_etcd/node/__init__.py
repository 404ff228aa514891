"""Runs one node: its session, watches, joining, leading and leaving; asyncio, no threads."""
