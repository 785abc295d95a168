#!/usr/bin/env bash
# Runs the tests that take minutes, which plain pytest leaves out: four models on every mesh, in one process and between
# two and four; checkpoints from mesh to mesh; a run killed ten times on one device and on eight; twenty verdicts of
# src.train_compile against the compiler's own; and further meshes, families and compilations of kinds of which plain
# pytest has one or two.
#
#   bash end_to_end/long_tests.sh     about two hours on two cores
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
"$python" -m pytest -m long
