"""Times the quickstart's startup and its imports: `python scripts/startup.py [--starts 3] [key=value ...]`.

For each start, prints the wall-clock seconds until the first printed line and until the first step's line, without
cached programs (`jax_cache_dir=`), and the CPU seconds of the process and its children until the first step, which
other load affects less. Then prints the packages that `import src.train` loads, by their modules' own import time.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Prints a line for each start, the medians, and the slowest packages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="key=value")
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_intermixed_args()
    times = [time_start(options.keys) for _ in range(options.starts)]
    for first_line, first_step, cpu in times:
        print(f"first line {first_line:.2f} s, first step {first_step:.2f} s, {cpu:.2f} s of CPU")
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    print("medians: first line {:.2f} s, first step {:.2f} s, {:.2f} s of CPU".format(*medians))
    total, packages = time_imports()
    print(f"imports: {total:.2f} s of src.train; by package")
    for name, seconds in packages.most_common(15):
        print(f"  {seconds:6.3f} s  {name}")


def time_start(keys: list[str]) -> tuple[float, float, float]:
    """Starts the quickstart and kills it after its first step.

    Returns the seconds until the first line and until the first step, and the CPU seconds until then. Raises SystemExit
    if the run ends earlier.
    """
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["jax_cache_dir=", "log_period=1", "steps=2", f"base_output_directory={folder}"]
        command = [sys.executable, "-m", "src.train", "configs/quickstart.yml", *fixed, *keys]
        start, first_line = time.perf_counter(), 0.0
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                first_line = first_line or time.perf_counter() - start
                if line.startswith("step 1/"):
                    first_step = time.perf_counter() - start
                    cpu = sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
                    process.kill()
                    return first_line, first_step, cpu / os.sysconf("SC_CLK_TCK")
    raise SystemExit("the run ended before its first step")


def time_imports() -> tuple[float, Counter[str]]:
    """Returns the seconds of `import src.train`, and for each package the sum of its modules' own times."""
    command = [sys.executable, "-X", "importtime", "-c", "import src.train"]
    errors = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    packages: Counter[str] = Counter()
    for own, module in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", errors):
        packages[module.partition(".")[0]] += int(own) / 1e6
    return packages.total(), packages


if __name__ == "__main__":
    main()
