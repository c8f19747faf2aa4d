"""Rewards for form: format, JSON schema, language, length."""
