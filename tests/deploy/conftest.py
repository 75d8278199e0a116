"""What is run as a process of its own is not collected."""

collect_ignore = ["hastened", "scenario.py"]
