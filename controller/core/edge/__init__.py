"""What may pass from agents to the machine: pure rules, applied before anything is decided."""
