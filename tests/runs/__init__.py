"""Tests of oncurve.runs."""
