"""What the controller's journal costs."""
