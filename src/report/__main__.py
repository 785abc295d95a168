"""Runs `python -m src.report`."""

from src.cli import run_command
from src.report.page import main

run_command(main)
