"""niels_gpt: a recipe on top of shardmill. Names, constants and order of calls; no token loops."""
