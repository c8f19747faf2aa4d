"""The recipe schema as pydantic models: every key, its default, and the reason for the default."""
