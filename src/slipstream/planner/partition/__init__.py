"""Assigns layers to stages and ranks so that the slowest rank is as fast as possible."""
