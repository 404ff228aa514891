"""Links between nodes over TCP."""
