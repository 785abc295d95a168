"""Lets JAX find the compilers installed by `bash setup.sh aot`. Import this before JAX, which searches on import.

The compilers are in a separate folder so that no other command loads them. If installed next to JAX, every start of JAX
would try them, which takes time and prints a warning on machines without an accelerator.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(sys.prefix) / "aot"))  # last, so that packages for this machine's own accelerator come first
# A process can use one CUDA plugin, and JAX would take whichever it loads first: block setup.sh's, for CUDA 12.
if find_spec("jax_cuda13_plugin"):
    plugin: Any = SimpleNamespace(initialize=lambda: None)
    sys.modules["jax_plugins.xla_cuda12"] = plugin
