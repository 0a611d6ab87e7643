"""One file per group of routes; each makes a router over the server's state."""
