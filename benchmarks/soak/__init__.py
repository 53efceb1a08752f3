"""A run that meets one fault after the other."""
