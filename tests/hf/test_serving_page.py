"""The page on serving has a row for each family that an export writes; end_to_end/vllm_config.sh asks vLLM itself."""

import re
from pathlib import Path

from src.extras.hf.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def test_every_exported_family_has_one_row_with_vllms_code_for_it():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (own|transformers) \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted({family.architecture for family in FAMILIES})
    assert len(rows) == len(re.findall("^\\| `", PAGE.read_text(), re.MULTILINE))
