"""Sandbox for programs that a model wrote: one process each, without network, files or access to other processes."""
