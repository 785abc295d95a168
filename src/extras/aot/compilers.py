"""Lets JAX find the compilers of `bash setup.sh aot`: import this before JAX, which looks for them when it is imported.

They lie in a folder of their own, so that no other command meets them. Beside JAX they would be tried at its every
start, which takes time and, where there is no accelerator, prints that none was found.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(sys.prefix) / "aot"))  # last: what is installed for this machine's own accelerator comes first
if find_spec("jax_cuda13_plugin"):  # its own: a process can have one, and JAX would take whichever it loads first
    sys.modules["jax_plugins.xla_cuda12"] = SimpleNamespace(initialize=lambda: None)
