"""Every script that reads its words by argparse explains itself: help is not a fault of the command."""

import json
import subprocess
import sys

from tests.runs import ROOT

# In one process, because most scripts import JAX.
HELP = """
import contextlib, io, json, runpy, sys, traceback
path = [*sys.path]
for script in sys.argv[1:]:
    said, code = io.StringIO(), None
    sys.argv, sys.path[:] = [script, "--help"], [script.rpartition("/")[0], *path]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            code = error.code
        except Exception:
            traceback.print_exc()
    print(json.dumps([script, code, said.getvalue()]))
"""


def test_help_is_no_fault():
    texts = {str(file): file.read_text() for file in sorted((ROOT / "scripts").rglob("*.py"))}
    scripts = [
        file for file, text in texts.items() if "argparse.ArgumentParser(" in text and "import maxtext" not in text
    ]
    assert len(scripts) > 10
    done = subprocess.run([sys.executable, "-c", HELP, *scripts], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {script: (code, said) for script, code, said in map(json.loads, done.stdout.splitlines())}
    assert list(found) == scripts
    faulty = {
        script: said
        for script, (code, said) in found.items()
        if code != 0 or not said.startswith("usage: ") or "error: " in said
    }
    assert not faulty
