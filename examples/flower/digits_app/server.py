"""What runs on the server; its settings are in pyproject.toml."""

from digits_app.task import CLIENTS, model
from selffl.flower import server_app

app = server_app(model, "self-fl", CLIENTS)
