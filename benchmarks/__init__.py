"""Measurements behind the claims: each writes its table and setting to results/."""
