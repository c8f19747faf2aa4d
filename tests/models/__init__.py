"""Tests of loading, packing and the chunked LM head."""
