"""Measures this library side by side with every rendezvous backend torch has.

``python -m benchmarks COMMAND --json FILE [--plot FILE]``, from the repository's root, with the
extra ``bench`` installed. The commands and what their numbers mean are in benchmarks/NOTES.md.
"""
