"""Training runs: from a model and a federation to personal models, with records of everything on the way."""
