"""Self-FL between three sites, on handwritten digits."""
