"""Finds the order of actions that makes a step shortest, and proves how short it can be."""
