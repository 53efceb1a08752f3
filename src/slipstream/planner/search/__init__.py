"""Searches all configurations for the plan with the shortest simulated step."""
