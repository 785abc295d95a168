"""Checks a configuration and the code that it runs, shrunk to a small size and on virtual CPU devices.

The command is `python -m src.verify CONFIG`.
"""
