"""The prescribed names of other projects, as thin packages over the core."""
