"""The model: loading it, packing tokens for it, and what it says of each token."""
