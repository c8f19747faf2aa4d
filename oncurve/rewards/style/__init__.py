"""Rewards for the form of a completion: format, JSON schema, language, length."""
