"""`python -m shardmill.cli` is the `shardmill` command."""

from shardmill.cli import main

main()
