"""The thread of the event loop: calls into it, forks, signals, exit."""
