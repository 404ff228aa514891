"""Fuzzing: whatever comes in from outside, only this library's own errors come out."""
