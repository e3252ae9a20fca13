"""The command line of dtrain. It uses dtrain's public API alone."""
