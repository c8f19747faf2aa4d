"""Tasks over data: files, public data sets, preference pairs, lists from Python."""
