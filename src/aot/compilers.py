"""Lets JAX find the compilers of `bash setup.sh aot`: import this before JAX, which looks for them when it is imported.

They lie in a folder of their own, so that no other command meets them. Beside JAX they would be tried at its every
start, which takes time and, where there is no accelerator, prints that none was found.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(sys.prefix) / "aot"))  # last: what is installed for this machine's own accelerator comes first
