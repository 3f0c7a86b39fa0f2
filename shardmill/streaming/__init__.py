"""Text straight to batches of one shape, with a state that loses nothing."""
