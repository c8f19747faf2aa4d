"""The examples run and agree with the library."""
