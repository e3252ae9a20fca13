"""The thin shells around the machines: what runs on the scheduler and on the workers."""
