"""What a client's rows can do for a model: gradients through the one task interface."""
