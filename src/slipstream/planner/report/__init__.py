"""A plan for people: its wording, and the HTML report."""
