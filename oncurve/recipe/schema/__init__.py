"""What a recipe can say, as pydantic models: every key, its default, and the reason for that default."""
