"""Runs a schedule with real tensors: batches cut into slices, messages between ranks, one executor a rank."""
