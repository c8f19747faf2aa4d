"""Whole runs: killed, resumed, repeated, and learning."""
