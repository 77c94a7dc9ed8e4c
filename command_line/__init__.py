"""The command line behind ``fulgurite`` and ``python cli.py``."""
