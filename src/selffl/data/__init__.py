"""Data sets, federations of rows, and tables of estimates."""

from selffl.data.registry import DATA_SETS, load

__all__ = ["DATA_SETS", "load"]
