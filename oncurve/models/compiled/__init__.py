"""Functions in C for small models on a CPU, built by the machine's own compiler; torch does the same where they can't be."""
