"""`python -m src.report RUN`."""

from src.errors import run_command
from src.report.page import main

run_command(main)
