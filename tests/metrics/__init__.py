"""The metrics of a node: what is counted, and where it is shown."""
