"""Reports a hang: the stacks of all threads, the position in the data, and the devices' memory."""

import faulthandler
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, TextIO

import jax

from src.checkpoint.run_folder import RunFolder, is_remote
from src.system.errors import show


class HangReport(NamedTuple):
    """Describes a hang, as far as the watchdog knows it."""

    problem: str
    limit: float  # seconds
    dispatched: int  # the step that was dispatched last
    rows_taken: int
    sources: Sequence[str]  # names of S sources
    positions: Sequence[tuple[int, Sequence[Sequence[int]]]]  # this host's rows, and where each resumes: [S, 2]

    def write(self, folder: RunFolder) -> None:
        """Writes hang-*.txt to the run's folder, or to stderr if that fails, and prints its location."""
        process = jax.process_index()
        name = time.strftime(f"hang-%Y-%m-%d-%H-%M-%S-process-{process}.txt")
        local, where = folder.local / name, folder.path / name
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            with local.open("x", encoding="utf-8") as out:
                self._print(out)
        except Exception as error:  # keep watching even if the report fails
            where = f"stderr, because {where} cannot be written: {error}"
            self._print(sys.stderr)
        else:
            if is_remote(folder.path):  # in a thread, because the store may be the one that does not answer
                threading.Thread(target=lambda: where.write_text(local.read_text("utf-8")), daemon=True).start()
        show(f"process {process}: {self.problem}: stacks, data position and device memory are in {where}")

    def _print(self, out: TextIO) -> None:
        lines = [
            f"{socket.gethostname()}, process {jax.process_index()}: {self.problem}, at {time.strftime('%F %T %z')}.",
            f"Step {self.dispatched - 1} has ended, step {self.dispatched} was dispatched; "
            f"the limit is {self.limit:.3g} s.",
            f"\nThe run has taken {self.rows_taken:,} rows. Each of this host's rows continues with",
        ]
        for row, places in self.positions:
            pairs = zip(self.sources, places, strict=True)
            lines.append(f"  row {row}: {'; '.join(f'{s} document {n}, token {t}'.strip() for s, (n, t) in pairs)}")
        lines += ["\nThreads", *(f"  {thread.ident or 0:#018x} {thread.name}" for thread in threading.enumerate())]
        print(*lines, sep="\n", file=out, flush=True)
        faulthandler.dump_traceback(out, all_threads=True)
        print("\nDevice memory", file=out, flush=True)  # last, because the devices may not answer
        for device in jax.local_devices():
            try:
                stats = device.memory_stats() or {}
                known = [f"{name} {size / 2**30:.2f} GiB" for name, size in stats.items() if "bytes" in name]
            except Exception as error:  # the device has failed, which may be why the step hangs
                known = [f"{type(error).__name__}: {error}"]
            print(f"  {device}: {', '.join(known) or 'not reported'}", file=out, flush=True)
