"""Keeps a running run's report.html up to date."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

from src.checkpoint.run_folder import RunFolder
from src.extras.pages.history import History
from src.extras.pages.page import page


class LiveReport:
    """Writes a running run's report.html in the background, using at most 2% of the time; for process 0 only."""

    def __init__(self, folder: RunFolder) -> None:
        self.history = History()  # the page's data, as of the last write
        self._folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        self._not_before = 0.0

    def update(self) -> None:
        """Starts writing the page, unless a write is in progress or recent."""
        if time.monotonic() >= self._not_before and (self._writing is None or self._writing.done()):
            self._writing = self._thread.submit(self._write)

    def finish(self) -> str:
        """Writes the page once more; returns its path, or why writing failed, which does not fail the run."""
        report = self._folder.path / "report.html"
        try:
            self._thread.submit(self._write).result()
        except Exception as error:  # of any store, or because files changed in the meantime
            message = " ".join(str(error).split())
            return f"not written, unlike the rest: {type(error).__name__}: {message} (python -m src.report tries again)"
        return str(report)

    def close(self) -> None:
        """Waits until a write in progress is complete."""
        self._thread.shutdown()

    def _write(self) -> None:
        begin = time.monotonic()
        self.history.read(self._folder.local / "metrics.jsonl")
        self._folder.write_text("report.html", page(self._folder.path, self.history))
        self._not_before = time.monotonic() + 50 * (time.monotonic() - begin)
