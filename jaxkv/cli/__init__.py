"""The command line: serve, generate, bench, models, convert."""
