#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of `run.py mutants`: the crates of the workspace, and no others, are built with their planted bugs.
exec "$@" --cfg storaged_mutants
