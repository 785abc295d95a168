"""Keeps a running run's report.html up to date."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

from src.checkpoint.run_folder import RunFolder
from src.extras.pages.history import History
from src.extras.pages.page import page


class LiveReport:
    """Writes a running run's report.html in the background, in at most a fiftieth of the time; only on process 0."""

    def __init__(self, folder: RunFolder) -> None:
        self.history = History()  # what the page shows, as of the last time it was written
        self._folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        self._not_before = 0.0

    def update(self) -> None:
        """Starts to write the page, unless it is being written or was written recently."""
        if time.monotonic() >= self._not_before and (self._writing is None or self._writing.done()):
            self._writing = self._thread.submit(self._write)

    def finish(self) -> str:
        """Writes the page once more; returns its path, or why it could not be written, which fails no run."""
        report = self._folder.path / "report.html"
        try:
            self._thread.submit(self._write).result()
        except Exception as error:  # of any store, or because files were changed meanwhile
            message = " ".join(str(error).split())
            return f"not written, and all else is: {type(error).__name__}: {message} (python -m src.report tries again)"
        return str(report)

    def close(self) -> None:
        """Waits until a page that is being written is complete."""
        self._thread.shutdown()

    def _write(self) -> None:
        begin = time.monotonic()
        self.history.read(self._folder.local / "metrics.jsonl")
        self._folder.write_text("report.html", page(self._folder.path, self.history))
        self._not_before = time.monotonic() + 50 * (time.monotonic() - begin)
