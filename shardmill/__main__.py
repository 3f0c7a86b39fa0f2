"""`python -m shardmill` is the `shardmill` command."""

from shardmill.cli import main

main()
