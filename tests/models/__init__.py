"""Tests of the policy, loading, packing, heads and fast paths."""
