"""What end_to_end/all.sh says of scripts that pass, fail and can't run here; the jobs themselves are its business."""

import subprocess

from tests.runs import ROOT


def all_of(*scripts):
    command = ["bash", ROOT / "end_to_end" / "all.sh", *scripts]
    return subprocess.run(command, capture_output=True, text=True)


def test_each_script_passes_fails_or_is_skipped_with_the_reason(write):
    passes = write("passes.sh", "echo fine")
    skipped = write(
        "skipped.sh", f"source {ROOT}/end_to_end/common.sh\necho so far\nskip 'no such machine'\necho beyond"
    )
    fails = write("fails.sh", "echo 'first line'\necho 'the losses differ' >&2\nexit 3")
    ended = all_of(passes, skipped, fails)
    assert ended.returncode == 1
    first, second, third = ended.stdout.splitlines()
    assert first.startswith("PASS  passes")
    assert second == "SKIP  skipped  no such machine"
    assert third.startswith("FAIL  fails")
    assert "exit code 3: the losses differ" in third
    assert all_of(passes, skipped).returncode == 0
