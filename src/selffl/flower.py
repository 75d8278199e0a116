"""Federations between real sites, over Flower: the two apps, and what they leave.  Needs ``selffl[flower]``."""

from selffl.engines.flower.client import client_app, personal_model
from selffl.runs.flower import server_app

__all__ = ["client_app", "personal_model", "server_app"]
