"""The round's key-value store on etcd: every write applied once, waits by watch. Knows no torch."""
