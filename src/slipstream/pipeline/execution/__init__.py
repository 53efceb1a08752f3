"""Runs one rank's actions with real tensors and records when each ran."""
