"""Queues and readers: the master's part, the workers', and items as bytes."""
