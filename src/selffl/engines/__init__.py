"""What runs an algorithm: rounds, cohorts, client memory."""
