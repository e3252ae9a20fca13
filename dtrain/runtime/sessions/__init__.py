"""Sessions: the master's part, the workers', how clients talk to them, and their tasks."""
