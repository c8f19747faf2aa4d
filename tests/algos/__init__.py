"""Hand-computed numbers and laws for the formulas."""
