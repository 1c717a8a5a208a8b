"""Which events of jobs people are notified of, and which of them make one message."""
