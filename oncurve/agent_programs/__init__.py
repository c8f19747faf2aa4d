"""Agents that are the user's own programs: each calls an OpenAI-compatible endpoint, served while the run samples."""
