"""Data sets, federations of rows, and tables of estimates."""
