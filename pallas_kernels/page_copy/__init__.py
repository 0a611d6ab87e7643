"""Copying whole pages inside the pool: copy on write."""
