"""Where a client's memory lives between rounds."""
