"""Look at stores: the browser page and its server, `diff` and `blame`. Nothing is written.

The page is in the folder `page`; README.md lists the modules.
"""
