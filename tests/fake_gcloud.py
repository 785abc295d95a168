"""Plays gcloud, and behind it Cloud TPU, for tests/test_launch.py: knows its flags, and runs on this machine what `ssh`
sends to a worker, in a folder a worker.

A program: `fake_gcloud.py compute tpus ... `. The folder of FAKE_CLOUD has calls.jsonl, what was asked; states, those
that the queued resource has, one an inquiry, the last of which stays; shape, its slices and the workers of each;
broken, a worker that no command reaches alone; and workers/NODE-WORKER, the worker's home.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

# The flags of gcloud 528.0.0's own reference (`gcloud compute tpus ... --help`) that take a value, and that take none.
WIDE = {"--zone", "--project", "--format"}
QUIET = {"--quiet"}
FLAGS = {
    ("queued-resources", "create"): (
        {"--accelerator-type", "--runtime-version", "--node-id", "--node-count", "--node-prefix"},
        {"--spot", "--reserved", "--guaranteed", "--async"},
    ),
    ("queued-resources", "describe"): (set(), set()),
    ("queued-resources", "delete"): (set(), {"--force", "--async"}),
    ("tpu-vm", "describe"): (set(), set()),
    ("tpu-vm", "ssh"): ({"--worker", "--command", "--strict-host-key-checking", "--ssh-flag"}, {"--internal-ip"}),
    ("tpu-vm", "scp"): ({"--worker", "--strict-host-key-checking", "--scp-flag"}, {"--recurse", "--compress"}),
}


def parse(argv):
    """The command's two words, its positional arguments and its flags; exits as gcloud does on one it has not."""
    assert argv[:2] == ["compute", "tpus"], argv
    command = tuple(argv[2:4])
    valued, plain = FLAGS[command]
    words, flags = [], {}
    for argument in argv[4:]:
        flag, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            words.append(argument)
        elif flag in (valued | WIDE if equals else plain | QUIET):
            flags[flag] = value
        else:
            sys.exit(f"ERROR: (gcloud.compute.tpus) unrecognized arguments: {argument}")
    return command, words, flags


def main(argv):
    cloud = Path(os.environ["FAKE_CLOUD"])
    with (cloud / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(argv) + "\n")
    if argv[:2] == ["config", "get-value"]:
        settings = json.loads((cloud / "settings.json").read_text())
        print(settings.get(argv[2], "(unset)"))
        return 0
    command, words, flags = parse(argv)
    assert {"--zone", "--project"} <= flags.keys(), argv
    slices, workers = map(int, (cloud / "shape").read_text().split())
    nodes = [words[0]] if slices == 1 else [f"{words[0]}-{i}" for i in range(slices)]
    if command == ("queued-resources", "create"):
        several = {"--node-count", "--node-prefix"} & flags.keys()
        assert bool(several) != ("--node-id" in flags), argv
        assert int(flags.get("--node-count", 2)) > 1, "Node count must be greater than 1"
    elif command == ("queued-resources", "describe"):
        states = (cloud / "states").read_text().split()
        (cloud / "states").write_text(" ".join(states[1:] or states))
        assert flags["--format"] == "value(state.state,tpu.nodeSpec[].nodeId)"
        print(states[0], ";".join(nodes), sep="\t")
    elif command == ("tpu-vm", "describe"):
        answers = {"networkEndpoints.len()": workers, "name.basename(),state,health": f"{words[0]}\tREADY\tHEALTHY"}
        print(answers[flags["--format"].removeprefix("value(").removesuffix(")")])
    elif command == ("tpu-vm", "scp"):
        source, (node, path) = words[0], words[1].split(":")
        for home in homes(cloud, node, flags["--worker"], workers):
            (home / path).write_bytes(Path(source).read_bytes())
    elif command == ("tpu-vm", "ssh"):
        if (broken := cloud / "broken").exists() and broken.read_text() == f"{words[0]}-{flags['--worker']}":
            return 255
        running = [
            subprocess.Popen(["bash", "-c", flags["--command"]], cwd=home, env={**os.environ, "HOME": str(home)})
            for home in homes(cloud, words[0], flags["--worker"], workers)
        ]
        return next((code for each in running if (code := each.wait())), 0)
    return 0


def homes(cloud, node, worker, workers):
    """The folders of the workers that `--worker` names."""
    chosen = range(workers) if worker == "all" else [int(worker)]
    for each in chosen:
        home = cloud / "workers" / f"{node}-{each}"
        home.mkdir(parents=True, exist_ok=True)
        yield home


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
