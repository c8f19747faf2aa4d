"""Tests, in the same tree as the code."""
