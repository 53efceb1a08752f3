"""Writes those pages and pictures of the documentation that follow from the sources."""
