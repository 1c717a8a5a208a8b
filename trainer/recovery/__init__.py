"""Where an attempt begins, and what is done about a step whose loss is not finite."""
