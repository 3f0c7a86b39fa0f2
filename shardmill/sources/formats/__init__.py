"""The file formats, one module each. `sources/open.py` lists them by the endings of file names."""
