"""``python -m selffl``."""

from selffl.cli import main

main()
