"""The methods over Flower: the same client step and the same server step, with a network in between.

Needs ``flwr`` (1.41), which nothing else in the library imports.  A client keeps its memory on its own disk
(`selffl.engines.flower.memory`), trains as a cohort of one (`selffl.engines.flower.site`), and the server
(`selffl.engines.flower.server`) does with the answers what the cohort engine does with a cohort.
"""
