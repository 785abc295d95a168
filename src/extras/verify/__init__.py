"""Checks a configuration and the code that it runs, in small, on virtual devices: `python -m src.verify CONFIG`."""
