"""One module per trainer."""
